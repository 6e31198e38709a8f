"""The fused pass: all tokens of a prompt enter a model, stored keys and values are placed, chosen tokens run.

Hooks on the decoder's layers cut hidden states, position ids and (cos, sin) to the chosen tokens; hooks on the
attention modules place what is stored of a layer before its own keys are written over it. No family's code is known:
a decoder layer is the parent of an attention module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from longreach.adapters.transformers.attach import Session
from longreach.adapters.transformers.checks import check_model, decoder_of
from longreach.adapters.transformers.fusing.loading import Loading, Wait
from longreach.adapters.transformers.fusing.prompt import FusedPrompt
from longreach.adapters.transformers.hf_cache import LongreachCache
from longreach.adapters.transformers.oom import memory_errors
from longreach.adapters.transformers.rotary import (
    Captured,
    Rotation,
    attention_modules,
    captured,
    find_rotation,
    probing,
)
from longreach.adapters.transformers.shard import ranks_of
from longreach.adapters.transformers.step import Step
from longreach.cache import Append
from longreach.errors import ConcurrentUse, InvalidInput, Unsupported
from longreach.methods.call import LayerCall
from longreach.methods.slots import FullLayer, Fusion, PromptParts
from longreach.ops import HeadShard, RotaryAngles, Rows


@dataclass(frozen=True)
class FusionReport:
    """What became of a prompt's tokens. exact: stored ones that are what a plain prefill makes; recomputed: stored ones
    that ran; reused: stored ones that are not exact and did not run; computed: those that were not stored.

    key_error, value_error: for each layer whose stored keys and values were placed, how far they were off at the
    recomputed tokens: norm of the difference over norm of the recomputed; None where none was.
    loaded_bytes: of stored keys and values that were copied to the model's device; waited_seconds: how long its stream
    waited for copies that ran beside it (see `Loading`). Under tensor parallelism the errors are of all KV heads, bytes
    and seconds of this rank.
    """

    tokens: int
    exact: int
    recomputed: int
    reused: int
    computed: int
    key_error: tuple[float | None, ...]
    value_error: tuple[float | None, ...]
    loaded_bytes: int = 0
    waited_seconds: float = 0.0


def read(session: Session, cache: LongreachCache, prompt: FusedPrompt, *, then: int = 0) -> tuple[Tensor, FusionReport]:
    """Put a prompt into an empty cache by the session's fusion method; logits [V] in fp32 after it, and what was done.

    then: tokens that the answer will take; the cache makes room for them at once. Decode methods observe all tokens.
    Whatever is raised, the cache is empty again. Raises InvalidInput (no fusion method, a cache that holds something, a
    chunk of other layers, heads or dtype than the model's, more tokens that must stay than the eviction method keeps),
    Unsupported (a model whose layers get no pair (cos, sin), or that is not its kind of decoder), OutOfMemory,
    ConcurrentUse. That chunks are of this very model is not checked here: their keys name its fingerprint.
    Under tensor parallelism every rank must read the same prompt; the first one's choice of tokens is that of all.
    """
    if session.fuse is None:
        raise InvalidInput("the session has no fusion method; attach with fuse='a3' or another one")
    if cache.columns or cache.batch != 1:
        raise InvalidInput(
            f"a fused prompt begins an empty cache of one sequence; this one holds {cache.columns} columns of "
            f"{cache.batch}"
        )
    count = len(prompt.ids)
    try:
        with memory_errors(), session.prompt_end(count), cache.restored_on_error(), torch.no_grad():
            if session.evict is not None:  # the question's rows vote
                asking, first = count - prompt.question, min((start for start, _ in prompt.chunks), default=0)
                session.evict.check_parts(count, first, asking)
                cache.evict_next(replace(session.evict, window=asking), first)
            fused = _FusedPass(session, cache, prompt, session.fuse, then)
            return fused.run(), fused.report()
    except ConcurrentUse:  # the cache is another caller's
        raise
    except BaseException:
        cache.empty()
        raise


class _Probed(Exception):
    """Leaves a pass whose question has chosen."""

    def __init__(self, chosen: Tensor):
        super().__init__()
        self.chosen = chosen


class _FusedPass:
    def __init__(self, session: Session, cache: LongreachCache, prompt: FusedPrompt, fusion: Fusion, then: int):
        self.session, self.cache, self.prompt, self.fusion = session, cache, prompt, fusion
        model = session.model
        self.device = model.device
        self.attending, self.layers = _modules(session)
        self.ranks = ranks_of(decoder_of(model))
        self._check_chunks()
        self.ids = torch.tensor([prompt.ids], device=self.device)
        self.parts: PromptParts = prompt.parts(self.device)
        self.at = self.parts.stored.nonzero()[:, 0]  # the stored tokens
        self.turn_by = self.at if fusion.true_positions else prompt.local_positions(self.device)[self.at]
        self.then = then
        self.probe: int | None = None  # the layer up to which the pass under way runs, to choose there
        self.given: Tensor | None = None  # what a probe has chosen
        self.index: Tensor | None = None  # the tokens that run, once chosen
        self.angles: tuple[Tensor, Tensor] | None = None  # of all tokens, in the layer under way
        self.narrowed: dict[int, tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]] = {}  # id of cos -> whole, cut
        self.turns: dict[tuple[int, Rotation], tuple[Tensor, RotaryAngles]] = {}  # (id of cos, how) -> cos, the turns
        self.loading = Loading((), self.device)
        self.loaded_bytes, self.waits = 0, list[Wait]()
        self.again: Tensor | None = None  # the recomputed tokens
        self.placing: Append | None = None  # the stored tokens' part of the pass
        self.before: tuple[Tensor, Tensor] | None = None  # what was placed there
        self.errors: dict[int, Tensor] = {}  # layer -> norms: of key and value differences, and of both

    def run(self) -> Tensor:
        for layer in self.fusion.probes(len(self.layers)) if self.prompt.chunks else ():
            self.probe = layer
            try:
                self._pass()
            except _Probed as found:
                self.given = found.chosen
        self.probe = None
        return self._pass()

    def _pass(self) -> Tensor:
        session, ids = self.session, self.ids
        self.index = self.again = self.before = self.placing = None
        self.narrowed.clear()
        self.turns.clear()
        full = self.fusion.full_layers
        shards = None if self.ranks is None else session.facts.shards
        self.loading = Loading(
            [chunk for _, chunk in self.prompt.chunks], self.device, full + 1 if full else 0,
            len(self.layers) if self.probe is None else self.probe + 1, shards,
        )  # fmt: skip
        self.cache.reserve([ids.shape[1]], self.then)  # a probe gives memory back
        append = self.cache.kv.begin([0], [len(self.prompt.ids)])
        self.step = Step(
            session.new_pass(self.cache, False), session.facts, (1, ids.shape[1]), None, append, self.cache
        )
        session.next_step = self.step
        try:
            with self._hooks():
                out = session.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        finally:
            session.next_step = None
            self.loaded_bytes += self.loading.bytes
            self.waits += self.loading.waits
        return out.logits[0, -1].float()

    def report(self) -> FusionReport:
        """Waits for the device."""
        stored, exact = int(self.parts.stored.sum()), int(self.parts.exact.sum())
        again = 0 if self.again is None else len(self.again)
        placed = list(self.errors)
        norms = torch.stack([self._of_all_heads(layer) for layer in placed]).tolist() if placed else []
        errors = {layer: (k / key, v / value) for layer, (k, v, key, value) in zip(placed, norms, strict=True)}
        shares = [errors.get(layer, (None, None)) for layer in range(len(self.layers))]
        return FusionReport(
            len(self.prompt.ids), exact, again, stored - exact - again, len(self.prompt.ids) - stored,
            tuple(key for key, _ in shares), tuple(value for _, value in shares), self.loaded_bytes,
            sum(wait.seconds() for wait in self.waits),
        )  # fmt: skip

    def _of_all_heads(self, layer: int) -> Tensor:
        """Norms [4] of a layer's errors, over the KV heads of all ranks."""
        return self.session.facts.shards[layer].sum(self.errors[layer].square()).sqrt()

    def _check_chunks(self) -> None:
        for number, (start, chunk) in enumerate(self.prompt.chunks):
            where = f"chunk {number}, at token {start}"
            if len(chunk.keys) != len(self.layers):
                raise InvalidInput(
                    f"{where}: it holds {len(chunk.keys)} layers and the model has {len(self.layers)}; it is another "
                    f"model's"
                )
            shape, held = self.session.facts.shape, (chunk.keys[0].shape[0], chunk.keys[0].shape[2])
            if held != (shape.kv_heads, shape.head_dim):
                raise InvalidInput(
                    f"{where}: it holds {held[0]} KV heads of {held[1]} channels and the model has {shape.kv_heads} of "
                    f"{shape.head_dim}; it is another model's"
                )
            if chunk.keys[0].dtype != self.session.model.dtype:
                raise InvalidInput(
                    f"{where}: it holds {chunk.keys[0].dtype} and the model runs in {self.session.model.dtype}; "
                    f"compute it with the model as it runs"
                )

    # hooks

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        made = [m.register_forward_pre_hook(self._layer(n), with_kwargs=True) for n, m in enumerate(self.layers)]
        made += [
            m.register_forward_pre_hook(self._attention(n), with_kwargs=True) for n, m in enumerate(self.attending)
        ]
        made += [m.register_forward_hook(self._attended(n)) for n, m in enumerate(self.attending)]
        try:
            yield
        finally:
            for hook in made:
                hook.remove()

    def _layer(self, number: int) -> Callable[..., Any]:
        """Before a decoder layer: from the last full layer on, cut its arguments to the tokens that run."""

        def cut(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if probing():
                return None
            pair = kwargs.get("position_embeddings")
            if not (isinstance(pair, tuple) and len(pair) == 2):
                raise Unsupported(f"{type(module).__name__} (layer {number}) gets no pair (cos, sin) to rotate by")
            self.angles = pair
            if number == self.fusion.full_layers:
                self._choose(None if number == 0 else self._computed(number, module, args, kwargs))
                if args:
                    args = (args[0][:, self.index], *args[1:])
                else:
                    kwargs["hidden_states"] = kwargs["hidden_states"][:, self.index]
            if self.index is not None:
                kwargs = {**kwargs, "position_embeddings": self._narrowed(pair)}
                if isinstance(kwargs.get("position_ids"), Tensor):
                    kwargs["position_ids"] = kwargs["position_ids"][:, self.index]
            return args, kwargs

        return cut

    def _narrowed(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(cos, sin) of the tokens that run; layers share them as they share those of all tokens."""
        known = self.narrowed.get(id(pair[0]))
        if known is None:
            cos, sin = (x[:, self.index] for x in pair)
            known = self.narrowed[id(pair[0])] = pair, (cos, sin)
        return known[1]

    def _computed(self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FullLayer:
        """Queries, keys and values of all tokens in a layer; the keys and values go to the cache."""
        assert self.angles is not None
        found = captured(module, args, kwargs, *self.angles)
        step, values = self.step, found.value[0].transpose(0, 1)
        self._shard(layer, found.key)  # before stored values are loaded
        self.cache.kv.append(layer, step.append, found.key[0].transpose(0, 1), values)
        return FullLayer(self._question(layer, found), values, lambda: self.loading.values(layer))

    def _question(self, layer: int, found: Captured) -> LayerCall:
        """The question's rows, the last of the pass, over the keys of all tokens."""
        step, last = self.step, slice(self.prompt.question - len(self.prompt.ids), None)
        place, q = step.append.at(layer), found.query[0].transpose(0, 1)[last]
        rows = Rows(q, step.append.seq[last], place.slot[last])
        kv, scale = self.cache.kv.view(layer, step.append), found.terms.get("scaling")
        return step.layers.call(
            layer, rows, kv, step.append.slots, q.shape[2] ** -0.5 if scale is None else float(scale),
            softcap=found.terms.get("softcap"), sink_logit=found.terms.get("s_aux"),
            shard=self._shard(layer, found.key),
        )  # fmt: skip

    def _choose(self, full: FullLayer | None) -> None:
        chosen = torch.zeros_like(self.parts.stored) if self.given is None else self.given
        if self.prompt.chunks and not self.fusion.probes(len(self.layers)):
            chosen = self._choice(full)
        self.again = chosen.nonzero()[:, 0]
        self.index = (chosen | ~self.parts.stored).nonzero()[:, 0]
        self.step.narrow(self.index)

    def _attention(self, number: int) -> Callable[..., Any]:
        """Before an attention module: place what is stored of the layer; what runs writes its own over it."""

        def place(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if probing() or self.index is None or not len(self.at):
                return
            if number == self.fusion.full_layers > 0:  # keys and values of all tokens are there
                return
            if self.ranks is not None and number not in self.session.facts.shards:
                self._shard(number, captured(module, args, kwargs, *kwargs["position_embeddings"]).key)
            self._place(number, self._rotation(number, module, args, kwargs))
            if number == self.probe:
                self._probed(number, module, args, kwargs)

        return place

    def _probed(self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The question has come to the layer in which it chooses: the pass has done its work."""
        found = captured(module, args, kwargs, *kwargs["position_embeddings"])
        k, v = (x[0].transpose(0, 1) for x in (found.key, found.value))
        self.cache.kv.append(layer, self.step.append, k, v)
        seen = FullLayer(self._question(layer, found), v[:0], lambda: self.loading.values(layer))
        raise _Probed(self._choice(seen))

    def _choice(self, layer: FullLayer | None) -> Tensor:
        """bool [N]: the stored tokens that are recomputed, the same on all ranks, which run them together."""
        chosen = self.fusion.choose(self.parts, layer) & self.parts.candidates
        return chosen if self.ranks is None else self.ranks.first(chosen)

    def _shard(self, layer: int, key: Tensor) -> HeadShard:
        """The KV heads that this rank holds of a layer whose keys arrive as `key` [1, G, T, D]."""
        return self.session.facts.shard(layer, self.attending[layer], key.shape[1])

    def _place(self, layer: int, rotation: Rotation | None) -> None:
        assert self.step.whole is not None and self.again is not None
        k, v = self.loading.layer(layer)
        turns = None if rotation is None else self._turns(rotation)
        if self.placing is None:
            self.placing = self.step.whole.take(self.at)
        self.cache.kv.append(layer, self.placing, k, v, angles=turns)
        self.before = self._held(layer) if len(self.again) else None

    def _turns(self, rotation: Rotation) -> RotaryAngles:
        """By what stored keys are turned; layers share it as they share the angles of all tokens."""
        assert self.angles is not None
        name = id(self.angles[0]), rotation
        if name not in self.turns:
            cos, sin = (rotation.pairs(x)[0, self.turn_by] for x in self.angles)
            self.turns[name] = self.angles[0], RotaryAngles(cos, sin, rotation.layout)
        return self.turns[name][1]

    def _attended(self, number: int) -> Callable[..., Any]:
        """After an attention module: how far what was placed was off, where it was recomputed."""

        def compare(module: nn.Module, args: Any, output: Any) -> None:
            if probing() or self.before is None:
                return
            after = self._held(number)
            apart = torch._foreach_sub(after, self.before)
            norms = torch._foreach_norm([*apart, *after], dtype=torch.float32)
            self.errors[number], self.before = torch.stack(norms), None

        return compare

    def _held(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [r, G, D] that the cache holds of the recomputed tokens."""
        assert self.step.whole is not None
        kv, place = self.cache.kv.view(layer, self.step.whole), self.step.whole.at(layer)
        assert self.again is not None
        page, offset = place.page[self.again], place.offset[self.again]
        return kv.k[page, :, offset], kv.v[page, :, offset]

    def _rotation(
        self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Rotation | None:
        """How the layer rotates; None where it does not."""
        known = self.session.facts.rotations
        if layer not in known:
            known[layer] = find_rotation(module, args, kwargs)
        found = known[layer]
        if isinstance(found, Rotation):
            return found
        if "does not rotate" in found:
            return None
        raise Unsupported(f"stored keys cannot be turned to their positions: {found}")


def _modules(session: Session) -> tuple[list[nn.Module], list[nn.Module]]:
    """The attention modules of a session's model, and the layers that hold them; the model is checked the first time.

    Raises Unsupported.
    """
    facts = session.facts
    if facts.modules is None:
        decoder = decoder_of(session.model)
        check_model(session.model, decoder, rotary=True)
        attending = attention_modules(decoder)
        facts.modules = attending, _parents(decoder, attending)
    return facts.modules


def _parents(decoder: nn.Module, attending: list[nn.Module]) -> list[nn.Module]:
    """The decoder's layers, in order: the parents of its attention modules."""
    parents = {id(child): module for module in decoder.modules() for child in module.children()}
    numbers = [int(m.layer_idx) for m in attending]  # type: ignore[arg-type]
    if numbers != list(range(len(attending))):
        raise Unsupported(f"{type(decoder).__name__} attends in layers {numbers}; fusion needs each once, in order")
    return [parents[id(module)] for module in attending]
