"""One step of healing: the parameters that are trained, their optimiser, and the update over several batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from longreach.adapters.transformers.mka import parameter_groups
from longreach.errors import InvalidInput
from longreach.train.mini.page import PADDING
from longreach.train.mka.budgets import levels_of
from longreach.train.mka.data import Batch
from longreach.train.mka.logits import hidden_states
from longreach.train.mka.losses import Weighting, backward
from longreach.train.mka.options import HealOptions

BETAS = (0.9, 0.95)
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StepResult:
    """Means of a step: the loss, and both of its terms in nats a token; the gradient's norm; each level's mean gate."""

    loss: float
    kl: float
    nll: float
    grad_norm: float
    gates: tuple[float, ...]


def trained_parameters(model: Any, which: str) -> dict[str, nn.Parameter]:
    """The parameters to train, by name: `HealOptions.train`. An index of blocks is never among them.

    Raises InvalidInput if there are none, or not in fp32.
    """
    mka, attention, index = [], [], []
    for name, module in model.named_modules():
        if isinstance(getattr(module, "mka", None), nn.Module):
            mka.append(f"{name}.mka.")
            index.append(f"{name}.mka.index.")
        if isinstance(getattr(module, "layer_idx", None), int) and "Attention" in type(module).__name__:
            attention.append(f"{name}.")
    if mka:  # of converted layers alone
        attention = [name.removesuffix("mka.") for name in mka]
    prefixes = {"levels": tuple(mka), "attention": tuple(attention), "all": ("",)}[which]
    found = {name: p for name, p in model.named_parameters() if name.startswith(prefixes)} if prefixes else {}
    found = {name: p for name, p in found.items() if not (index and name.startswith(tuple(index)))}
    if not found:
        raise InvalidInput(f"train {which!r}: the model has no such parameters; convert it, or train 'all'")
    wrong = next((name for name, p in found.items() if p.dtype not in (torch.float32, torch.float64)), None)
    if wrong is not None:
        raise InvalidInput(
            f"{wrong} is {found[wrong].dtype}, in which small steps are rounded away; load the model with "
            f"dtype=torch.float32 (on a GPU, training computes in bfloat16 all the same)"
        )
    return found


def _checkpointing(model: Any, what: str) -> Any:
    """The model's method, whose name differs with the version of transformers."""
    new = getattr(model, f"activation_checkpointing_{what}", None)
    return new or getattr(model, f"gradient_checkpointing_{what}")


class Trainer:
    """A model and its optimiser. Batches run on the model's device, in bf16 on a GPU.

    teacher: of the same vocabulary, on the same device; None without one.
    """

    def __init__(self, model: Any, teacher: Any, options: HealOptions):
        self.model, self.teacher, self.options = model, teacher, options
        self.parameters = trained_parameters(model, options.train)
        self.weighting = Weighting(options.text_loss, options.context_weight)
        self.device = torch.device(model.device)
        self._gates = [levels.router.gate.bias for levels in levels_of(model).values()]

    @contextmanager
    def running(self) -> Iterator[Trainer]:
        """Training mode, gradients of the trained parameters alone, an optimiser. Undone at the end."""
        model = self.model
        mode, needed = model.training, {p: p.requires_grad for p in model.parameters()}
        mine = {id(p) for p in self.parameters.values()}
        try:
            for p in model.parameters():
                p.requires_grad_(id(p) in mine)
            model.train()
            if self.options.checkpointing:
                _checkpointing(model, "enable")({"use_reentrant": False})
            self.optimizer = torch.optim.AdamW(
                self._groups(), lr=self.options.learning_rate, betas=BETAS, fused=self.device.type == "cuda"
            )
            self._rates = [group["lr"] for group in self.optimizer.param_groups]
            yield self
        finally:
            if self.options.checkpointing:
                _checkpointing(model, "disable")()
            model.train(mode)
            for p, need in needed.items():
                p.requires_grad_(need)
                p.grad = None

    def _groups(self) -> list[dict[str, Any]]:
        options = self.options
        if self._gates:
            return parameter_groups(self.model, options.learning_rate, options.gate_rate, options.weight_decay)
        matrices = [p for p in self.parameters.values() if p.dim() >= 2]
        vectors = [p for p in self.parameters.values() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        return [group for group in groups if group["params"]]

    def autocast(self) -> AbstractContextManager[Any]:
        """bf16 on a GPU."""
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def step(self, batches: Sequence[Batch], rate: float) -> StepResult | None:
        """One update over several batches; None, and no update, if the loss or the gradient is not finite.

        rate: of learning, relative to each group's own.
        """
        sums = torch.zeros(4, device=self.device)
        for batch in batches:
            sums += self._backward(batch, 1 / len(batches))
        norm = torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), self.options.clip)
        gates = torch.stack([gate.detach().float() for gate in self._gates]).mean(0) if self._gates else sums[:0]
        loss, kl, nll, tokens, size, *means = torch.cat([sums, norm.float()[None], gates]).tolist()  # waits for the GPU
        finite = math.isfinite(loss) and math.isfinite(size)
        if finite:
            for group, own in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = own * rate
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if not finite:
            return None
        count = max(1.0, tokens)
        return StepResult(loss / len(batches), kl / count, nll / count, size, tuple(means))

    def _backward(self, batch: Batch, scale: float) -> Tensor:
        """Add a batch's gradients; fp32 [4]: loss, sums of both terms, target tokens."""
        kinds = torch.from_numpy(batch.kinds).flatten()
        keep = (kinds != PADDING).nonzero()[:, 0]
        ids = torch.from_numpy(batch.tokens).to(self.device, non_blocking=True)
        weights = self.weighting.of(kinds[keep]).to(self.device, non_blocking=True)
        place = keep.to(self.device, non_blocking=True)
        targets = ids[:, 1:].flatten()[place]
        theirs = None
        if self.teacher is not None and self.options.kl:
            with torch.no_grad():
                theirs = hidden_states(self.teacher, ids[:, :-1]).flatten(0, 1)[place]
        with self.autocast():
            states = hidden_states(self.model, ids[:, :-1]).flatten(0, 1)[place]
            losses = backward(self.model, states, self.teacher, theirs, targets, weights, kl=self.options.kl,
                              nll=self.options.nll, scale=scale)  # fmt: skip
        return torch.stack([*losses, losses.loss.new_tensor(float(len(keep)))])

    def state(self) -> dict[str, Tensor]:
        """Trained parameters, and the optimiser's moments, by name."""
        found = dict[str, Tensor]()
        for name, p in self.parameters.items():
            found[f"parameter/{name}"] = p.data
            held = self.optimizer.state.get(p, {})
            found |= {f"{moment}/{name}": held[moment] for moment in MOMENTS if moment in held}
        return found

    def restore(self, state: dict[str, Tensor], updates: int) -> None:
        """Continue from `state` after `updates` updates. Raises InvalidInput if it is of another model."""
        wanted = {f"parameter/{name}": p.shape for name, p in self.parameters.items()}
        given = {name: x.shape for name, x in state.items() if name.startswith("parameter/")}
        if wanted != given:
            raise InvalidInput("the state to resume is of a model with other trained parameters; start again")
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(state[f"parameter/{name}"])
        for name, p in self.parameters.items():
            if f"{MOMENTS[0]}/{name}" in state:
                moments = {moment: state[f"{moment}/{name}"].to(p.device) for moment in MOMENTS}
                place = p.device if self.device.type == "cuda" else "cpu"
                self.optimizer.state[p] = {
                    "step": torch.tensor(float(updates), device=place, dtype=torch.float32), **moments
                }  # fmt: skip
