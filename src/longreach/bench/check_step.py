"""Whether a timed decode step computes its model: the tokens and logits of some of its steps against an exact pass.

The yardstick is the model itself, with nothing attached, compiled or captured, in one pass over the tokens that the
steps read: once in its own dtype and once in a wider one. The difference is what rounding does to this model over
these keys, and a step that rounds in other places may err twice as much.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longreach.bench.check import WrongResult

if TYPE_CHECKING:
    from longreach.adapters.transformers.synthetic import Draw

COUNT = 16  # steps that are checked
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}


@dataclass(frozen=True)
class Steps:
    """Steps of a decoder: tokens int64 [B, n] that it read and chose, and their logits [B, n, V]."""

    read: Tensor
    chosen: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Verdict:
    """steps that were checked; tokens_that_differ from the exact pass's choice; behind: how far such a token's exact
    logit is behind the best, at most behind_bound; error: the largest relative error of a step's logits (norms), at
    most error_bound; error_of_own_pass: that of the model's own pass in its own dtype.
    """

    steps: int
    tokens_that_differ: int
    behind: float
    behind_bound: float
    error: float
    error_bound: float
    error_of_own_pass: float

    def recorded(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def run_steps(decoder: Any, first: Tensor, *, capture: bool, count: int = COUNT) -> Steps:
    """Run a greedy decoder, captured where its graph is there, from the token first [B] on."""
    from longreach.adapters.transformers.loop.sampling import Ends

    read, chosen, logits = [], [], []
    with decoder.run(Ends((), 0), count):
        decoder.take(first)
        for _ in range(count):
            read.append(decoder.token.clone())
            decoder.step(capture=capture)
            chosen.append(decoder.token.clone())
            logits.append(decoder.logits.clone())
    return Steps(torch.stack(read, 1), torch.stack(chosen, 1), torch.stack(logits, 1))


@torch.no_grad()
def passes(
    model: Any, tokens: int, read: Tensor, seed: int, *, batch: int | None = None, window: int | None = None,
    draw: Draw | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Logits [B, n, V] of tokens read [B, n] after `tokens` drawn keys: in the model's dtype, and in a wider one.

    batch: sequences that keys were drawn for, of which the first B are computed, None: B. window: number of last keys
    visible to each row, its own among them; None: all. draw: of the keys and values, None: `synthetic.kv_of`.
    """
    from longreach.adapters.transformers.cache_name import CACHE
    from longreach.adapters.transformers.synthetic import filled_dynamic_cache, kv_of

    count, steps = read.shape
    last = tokens if window is None else min(tokens, window - 1)
    given: dict[str, Any] = {"position_ids": torch.arange(tokens, tokens + steps, device=read.device).expand(count, -1)}
    if window is not None:
        row, key = torch.arange(steps, device=read.device)[:, None], torch.arange(last + steps, device=read.device)
        seen = (key <= row + last) & (key > row + last - window)
        given["attention_mask"] = seen.expand(count, 1, -1, -1)

    def logits() -> Tensor:
        cache = filled_dynamic_cache(model, batch or count, tokens, seed, sequences=count, last=last,
                                     draw=draw or kv_of)  # fmt: skip
        return model(input_ids=read, **{CACHE: cache}, **given).logits

    plain = logits()
    with computing_in(model, WIDER[model.dtype]):
        return plain, logits()


@contextmanager
def computing_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Within this block the model computes in a wider dtype; only the module that runs has its parameters widened."""
    kept: list[tuple[nn.Parameter, Tensor]] = []

    def widen(module: nn.Module, _: Any) -> None:
        for parameter in module.parameters(recurse=False):
            kept.append((parameter, parameter.data))
            parameter.data = parameter.data.to(dtype)

    def restore(*_: Any) -> None:
        while kept:
            parameter, data = kept.pop()
            parameter.data = data

    owners = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
    hooks = [hook for m in owners for hook in (m.register_forward_pre_hook(widen), m.register_forward_hook(restore))]
    try:
        yield
    finally:
        restore()
        for hook in hooks:
            hook.remove()


def relative(got: Tensor, exact: Tensor) -> float:
    """The largest relative error (norms) of logits [..., V]; NaN where anything is."""
    exact = exact.double()
    return float(((got.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


def require_right(name: str, steps: Steps, first: Tensor, plain: Tensor, exact: Tensor) -> Verdict:
    """The verdict on the steps; raises WrongResult if their errors exceed the rounding error.

    Rounding gives a logit an error of up to e in the model's own pass, so up to 2 e in a step: the step may prefer a
    token whose exact logit is 4 e behind the best.
    """
    own = relative(plain, exact)
    most = 2 * own + torch.finfo(plain.dtype).eps
    error = relative(steps.logits, exact)
    values = steps.logits.gather(-1, steps.chosen[..., None])[..., 0]
    fed = torch.cat([first[:, None], steps.chosen[:, :-1]], 1)
    behind = (exact.amax(-1) - exact.gather(-1, steps.chosen[..., None])[..., 0]).double()
    far = 4 * float((plain.double() - exact.double()).abs().max())
    differ = int((steps.chosen != exact.argmax(-1)).sum())
    wrong = None
    if not torch.equal(steps.read, fed):
        wrong = "a step did not read the token chosen before"
    elif not error <= most:
        wrong = f"logits differ by {error:.2e}, more than {most:.1e}"
    elif not torch.equal(values, steps.logits.amax(-1)):
        wrong = "a step did not choose the token that its logits prefer"
    elif float(behind.max()) > far and differ:
        wrong = f"the logit of a chosen token is {float(behind.max()):.3g} behind the best, more than {far:.3g}"
    if wrong:
        raise WrongResult(f"{name}: {wrong}; its time does not count")
    return Verdict(steps.read.shape[1], differ, float(behind.max()), far, error, most, own)
