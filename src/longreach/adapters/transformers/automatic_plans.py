"""Plans for a session's methods that have none: found in the user's cache folder, or made of the first prompt."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from longreach.adapters.transformers.checks import decoder_of, shape_of
from longreach.adapters.transformers.fingerprint import fingerprint
from longreach.adapters.transformers.hf_cache import LongreachCache
from longreach.adapters.transformers.ranks import ranks_of
from longreach.adapters.transformers.residual_hooks import residuals
from longreach.adapters.transformers.step import running
from longreach.errors import InvalidInput, Unsupported
from longreach.methods.automatic import AutomaticPlans
from longreach.methods.base import AttentionMethod
from longreach.methods.call import LayerCall, Meter, ModelShape
from longreach.methods.kascade.calibrate import change
from longreach.methods.plan_maker import PlanMaker, PlanParts, PromptRead
from longreach.methods.plan_rows import PlanRows, RowsAndChanges
from longreach.plans import FINGERPRINT, NO_FOLDER, Kept, Made, Plan, PlannedModel, device_name, how_to_make, kept
from longreach.runtime import Ledger, PlanReport


def planned_shape(model: PreTrainedModel) -> ModelShape:
    """The model's shape for checks before a session: methods that leave their plan to the session pass them."""
    return replace(shape_of(model), plans=AutomaticPlans())


class PlanSession:
    """The automatic plans of one session. shape: the model's, by which methods reach them.

    fused: whether the session reads prompts of stored chunks, of which no plan is made.
    """

    def __init__(self, model: PreTrainedModel, *, fused: bool):
        self.plans = AutomaticPlans()
        self.shape = replace(shape_of(model), plans=self.plans)
        self.observers: tuple[PlanRows, ...] = ()
        self._model, self._fused = model, fused
        self._waiting: dict[str, PlanMaker] = {}
        self._kept: dict[str, Kept] = {}
        self._hashed: tuple[str, float] | None = None  # the plan that it was done for, and seconds
        self._not_kept: str | None = None  # why no plan of this model can be kept
        self._reports: dict[str, PlanReport] = {}
        self._hooks = ExitStack()

    def add(self, method: AttentionMethod) -> None:
        """A method of the session: find its plan, or wait for a prompt, if it leaves its plan to the session.

        Hashes the model's weights once. Raises Unsupported under tensor parallelism, where ranks see some heads each.
        """
        maker = method.plan_maker(self.shape)
        if maker is None or maker.kind in self._reports:
            return
        if ranks_of(decoder_of(self._model)) is not None:
            raise Unsupported(
                f"{method.name}: no plan is made of a prompt under tensor parallelism, as each rank sees its own heads "
                f"only; {how_to_make(maker.kind)}, with --ranks if the method has a head map, and give plan=plan.json"
            )
        found = self._find(maker)
        if found is not None and found.plan is not None:
            self.plans.put(found.plan)
            about = maker.about(found.plan)
            self._reports[maker.kind] = PlanReport(
                maker.kind, "cache", about, file=str(found.path), ignored=found.ignored,
                hash_seconds=self._hash_seconds(maker.kind),
            )  # fmt: skip
            return
        self._waiting[maker.kind] = maker
        if self._fused:
            self._wait(maker.kind, f"no {maker.kind} plan: none is made of a prompt with stored chunks")
            return
        self._wait(maker.kind, self.plans.reason(maker.kind))
        self._observe()

    def close(self) -> None:
        self._hooks.close()

    def reports(self) -> tuple[PlanReport, ...]:
        return tuple(self._reports.values())

    def make(self, cache: LongreachCache, ledger: Ledger) -> None:
        """Make the plans that are waited for of the prompt that was read into the cache last, if that was not tried."""
        if not cache.prompt_unplanned:
            return
        cache.prompt_unplanned, before = False, self.observers
        if self._waiting and self.observers:
            with torch.inference_mode(False), torch.no_grad():
                for maker in list(self._waiting.values()):
                    self._make(maker, cache, ledger)
            self._observe()
        for observer in before:
            if observer not in self.observers:
                cache.states.drop(observer)

    def _make(self, maker: PlanMaker, cache: LongreachCache, ledger: Ledger) -> None:
        started = now(self._model)
        try:
            prompt = self._prompt(maker, cache)
            parts = maker.make(prompt)
        except (InvalidInput, Unsupported) as refusal:
            remedy = f"; until then attention is dense. To make a plan from texts: longreach calibrate {maker.kind}"
            helps = isinstance(refusal, InvalidInput)  # of the prompt, not of the model
            self._wait(maker.kind, f"no {maker.kind} plan: {refusal}{remedy if helps else ''}")
            return
        plan = self._plan(maker, parts, prompt.length)
        seconds = now(self._model) - started
        for call in prompt.calls.values():
            if call.meter.noted:
                ledger.add_eviction(call, self.observers[0])
        self.plans.put(plan)
        del self._waiting[maker.kind]
        self._reports[maker.kind] = PlanReport(
            maker.kind, "prompt", maker.about(plan), prompt.length, seconds, *self._keep(plan),
            ignored=self._reports[maker.kind].ignored, hash_seconds=self._hash_seconds(maker.kind),
        )  # fmt: skip

    def _prompt(self, maker: PlanMaker, cache: LongreachCache) -> PromptRead:
        """The longest prompt of the batch. Raises InvalidInput where it is too short for the maker."""
        lengths = cache.kv.lengths
        slot = max(range(cache.batch), key=lengths.__getitem__)
        length, layers = lengths[slot], range(self.shape.layers)
        if length < maker.needed:
            raise InvalidInput(
                f"the prompt has {length} tokens, and {maker.needed} are needed to calibrate on; a longer one will be "
                f"calibrated on"
            )
        if any(cache.kv.evicted(layer) for layer in layers):
            raise InvalidInput("keys were evicted before; the next prompt in an empty cache will be calibrated on")
        views = [cache.kv.view_of_all(layer) for layer in layers]
        calls, changes = dict[int, LayerCall](), dict[int, Tensor]()
        for layer in layers if maker.rows else ():
            for state in cache.states.states(self.observers, layer):
                assert isinstance(state, RowsAndChanges)
                noted = state.noted(state.pos[slot].tolist(), length, maker.rows)
                if len(noted) < maker.rows:
                    raise InvalidInput(
                        f"{len(noted)} of the last {maker.rows} tokens in the cache are a prompt's, and all must be; "
                        f"the next prompt will be calibrated on"
                    )
                rows = state.rows([(slot, noted)])
                slots = torch.arange(cache.batch, device=rows.q.device)
                calls[layer] = replace(state.call, rows=rows, kv=views[layer], slots=slots, meter=Meter())
                changes[layer] = state.change[slot, torch.tensor([entry for entry, _ in noted])]
        return PromptRead(self.shape, length, slot, views, calls, changes)

    def _plan(self, maker: PlanMaker, parts: PlanParts, tokens: int) -> Plan:
        settings = {**parts.settings, "automatic": True, "dtype": str(self._model.dtype).removeprefix("torch.")}
        if self._digest is not None:
            settings[FINGERPRINT] = self._digest
        made = Made(
            data="the last tokens of a session's first prompt", sha256="", tokens=tokens, settings=settings, seed=0,
            longreach=version("longreach"), commit=None, torch=torch.__version__,
            transformers=transformers.__version__, device=device_name(self._model.device),
        )  # fmt: skip
        model = Path(self._model.config.name_or_path or "").name or type(self._model).__name__
        return Plan(maker.kind, PlannedModel.of(model, self.shape), parts.values, made, parts.arrays)

    @cached_property
    def _digest(self) -> str | None:
        """The fingerprint of the weights; None, and `_not_kept`, where not all of them can be read."""
        try:
            return fingerprint(self._model, chunks=False).digest
        except Unsupported as refusal:
            self._not_kept = str(refusal)
            return None

    def _find(self, maker: PlanMaker) -> Kept | None:
        started, first = now(self._model), "_digest" not in self.__dict__
        if self._digest is not None and first:
            self._hashed = maker.kind, now(self._model) - started
        if self._digest is None:
            return None
        found = self._kept[maker.kind] = kept(maker.kind, self.shape, self._digest, maker.about)
        return found

    def _hash_seconds(self, kind: str) -> float | None:
        return self._hashed[1] if self._hashed is not None and self._hashed[0] == kind else None

    def _keep(self, plan: Plan) -> tuple[str | None, str | None]:
        """(file, None), or (None, why the plan is not kept)."""
        if plan.kind not in self._kept:
            return None, self._not_kept
        path = self._kept[plan.kind].path
        if path is None:
            return None, NO_FOLDER
        try:
            plan.save(path)
        except InvalidInput as error:
            return None, f"{path.parent} cannot be written ({getattr(error.__cause__, 'strerror', None) or error})"
        return str(path), None

    def _wait(self, kind: str, reason: str) -> None:
        self.plans.reasons[kind] = reason
        ignored = self._kept[kind].ignored if kind in self._kept else ()
        self._reports[kind] = PlanReport(kind, None, reason, ignored=ignored, hash_seconds=self._hash_seconds(kind))

    def _observe(self) -> None:
        """Keep the rows of prompts that makers wait for, and no others."""
        rows = max((maker.rows for maker in self._waiting.values()), default=0)
        self.observers = (PlanRows(max(1, rows)),) if self._waiting and not self._fused else ()
        self._hooks.close()
        if rows:
            self._hooks.enter_context(residuals(self._model, self._see))

    def _see(self, layer: int, x: Tensor, out: Tensor) -> None:
        """Attention adds `out` [B, T, width] to x: note how much that turns the last rows of a prompt."""
        step = running()
        if step is None or step.cache is None or step.static or step.packed is not None:
            return
        if step.layers.segments[0].phase != "prefill":
            return
        for state in step.cache.states.states(self.observers, layer):
            assert isinstance(state, RowsAndChanges)
            count = min(x.shape[1], state.size)
            real = None if step.real is None else step.real[:, -count:]
            batch = torch.arange(x.shape[0], device=x.device)[:, None].expand(-1, count)
            pos = step.append.at(layer).seq_lens.long()[:, None] + torch.arange(-count, 0, device=x.device)
            turned = change(x[:, -count:].flatten(0, 1), out[:, -count:].flatten(0, 1)).view(pos.shape)
            some = slice(None) if real is None else real
            state.note_changes(batch[some].flatten(), pos[some].flatten(), turned[some].flatten())


def now(model: PreTrainedModel) -> float:
    """Wall-clock seconds, after waiting for the model's device."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()
