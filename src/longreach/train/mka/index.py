"""Distillation of `recall="index"`: the index learns where dense attention looks, block by block.

For each layer and KV head, over the blocks beyond a row's window:

    loss = sum_rows far_r KL(mass_r / far_r || softmax(score_r)) / sum_rows far_r

mass: dense attention's weight on each block, summed over the query heads; far: its sum. Queries and keys are inputs: no
gradient reaches the model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longreach.errors import InvalidInput
from longreach.evals.calibration.prompts import Prompt
from longreach.evals.progress import Progress, unseen
from longreach.mka.index import BlockIndex
from longreach.train.mka.budgets import levels_of
from longreach.train.mka.dense_rows import Cut, LayerRows, dense_rows
from longreach.train.mka.shares import COUNTS, Shares, indices_of

HELD_BYTES = 4 << 30  # rows and keys of prompts that are held together
FINAL = 0.1  # the last learning rate, relative to the first


class Example(NamedTuple):
    """One layer's rows of one prompt, before rotation.

    q: fp32 [R, H, D]; k: [G, n B, D]; target: fp32 [R, G, n], shares of far mass; far: fp32 [R, G]; allowed: bool
    [R, 1, n].
    """

    q: Tensor
    k: Tensor
    target: Tensor
    far: Tensor
    allowed: Tensor

    @classmethod
    def of(cls, rows: LayerRows) -> Example:
        turn, heads = rows.frequencies.turn, rows.k.shape[0]
        pos = torch.arange(rows.k.shape[1] * rows.k.shape[2], device=rows.q.device)
        far = rows.mass.sum(-1)
        q = turn(rows.q, -rows.pos[:, None].expand(rows.q.shape[:2]))
        k = turn(rows.k.flatten(1, 2), -pos.expand(heads, -1))
        return cls(q, k, rows.mass / far.clamp(min=1e-9)[..., None], far, rows.allowed)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self)


def index_loss(index: BlockIndex, example: Example) -> Tensor:
    """The loss above, without the entropy of the target, which is constant."""
    block = example.k.shape[1] // example.target.shape[2]
    blocks = index.of_keys(example.k).unflatten(1, (-1, block)).mean(2)  # [G, n, F]
    score = torch.einsum("rgf,gnf->rgn", index.of_queries(example.q, len(blocks)), blocks)
    log_share = score.masked_fill(~example.allowed, -torch.inf).log_softmax(-1)
    cross = -torch.where(example.allowed, example.target * log_share, 0.0).sum(-1)
    return (cross * example.far).sum() / example.far.sum().clamp(min=1e-9)


@torch.no_grad()
def linear_start(index: BlockIndex, examples: Sequence[Example], scale: float) -> BlockIndex:
    """An index whose score is the best approximation, of its rank, of the mean key's logit summed over the group.

    Features of queries and keys are linear: x = gelu(x) - gelu(-x). Both maps come from a singular value decomposition
    weighted by the covariances of queries and of blocks' mean keys.
    """
    made, hidden = copy.deepcopy(index), index.up.shape[2]
    dim = index.up.shape[1]
    rank, group = min(index.features, hidden // 2, dim), index.query.shape[1] // dim
    q = torch.cat([one.q.unflatten(1, (index.kv_heads, -1)).sum(2) for one in examples]).transpose(0, 1)  # [G, R, D]
    block = examples[0].k.shape[1] // examples[0].target.shape[2]
    k = torch.cat([one.k.unflatten(1, (-1, block)).mean(2) for one in examples], 1)
    k = k - k.mean(1, keepdim=True)  # what all blocks share chooses none
    (rq, iq), (rk, ik) = _roots(q), _roots(k)
    left, size, right = torch.linalg.svd(rq @ rk)
    root = size[:, None, :rank].sqrt()
    queries, keys = (iq @ left[..., :rank] * root), (ik @ right.transpose(1, 2)[..., :rank] * root)  # [G, D, rank]
    made.up.normal_().mul_(0.5 * made.up.shape[1] ** -0.5)
    made.down.zero_()
    made.query.normal_().mul_(0.05 * made.query.shape[1] ** -0.5)
    ones = torch.eye(rank, device=keys.device)
    made.up[..., : 2 * rank] = torch.cat([keys, -keys], -1)
    made.down[:, : 2 * rank, :rank] = torch.cat([ones, -ones])
    made.query[..., :rank] = (scale * queries).repeat(1, group, 1)
    return made


def _roots(x: Tensor) -> tuple[Tensor, Tensor]:
    """Square root of the covariance of x [G, n, D], and its inverse: [G, D, D]."""
    values, vectors = torch.linalg.eigh(x.transpose(1, 2) @ x / x.shape[1])
    values = values.clamp(min=1e-6 * float(values.max())).sqrt()
    return (vectors * values[:, None]) @ vectors.transpose(1, 2), (vectors / values[:, None]) @ vectors.transpose(1, 2)


@torch.no_grad()
def better_start(index: BlockIndex, examples: Sequence[Example], scale: float) -> BlockIndex:
    """The index as it is, or `linear_start`, whichever has the smaller loss: one that was trained before goes on."""
    made = linear_start(index, examples, scale)
    ours, other = (sum(float(index_loss(one, e)) for e in examples) for one in (index, made))
    return made if other < ours else index


def check_index(model: Any) -> None:
    """Raise InvalidInput for a model that recalls by no index."""
    levels = levels_of(model)
    if not levels:
        raise InvalidInput("the model was not converted, so it has no index; convert it with recall=index first")
    if not indices_of(model):
        config = next(iter(levels.values())).config
        used = f"recall={config.recall}" if 3 in config.tiers else f"tiers {config.tiers}, without level 3"
        raise InvalidInput(f"the model has no index to distil ({used}); convert the original with recall=index")


def distil(
    model: Any,
    prompts: Sequence[Prompt],
    held_out: Sequence[Prompt],
    *,
    steps: int = 150,
    learning_rate: float = 4e-3,
    rows: int = 128,
    counts: Sequence[int] = COUNTS,
    seed: int = 0,
    held_bytes: int = HELD_BYTES,
    progress: Progress = unseen,
    on_step: Callable[[int, int, float], None] = lambda layer, step, loss: None,
) -> dict[str, Any]:
    """Train the index of every layer that recalls by one, in place; shares found before and after, as JSON.

    prompts: read by the model's own attention with its present weights; each is used many times. held_out:
    other prompts, to measure shares. steps: updates of each layer's index, one prompt each. rows: of a prompt. counts:
    of recalled blocks. held_bytes: memory for rows and keys; prompts beyond it are read later, for steps of their own.
    on_step: called with layer, step and loss.
    Raises InvalidInput for a model without an index, prompts that are too short, or none.
    """
    check_index(model)
    if not prompts or not held_out:
        raise InvalidInput("prompts: expected at least one to train on and one to measure on; raise --prompts")
    if steps < 1 or not 0 < learning_rate < math.inf:
        raise InvalidInput(f"expected at least one step and a learning rate above 0, got {steps} and {learning_rate:g}")
    indices, config = indices_of(model), next(iter(levels_of(model).values())).config
    cut = Cut(config.block, config.window, rows, max(counts))
    trained, optimizers = dict[int, BlockIndex](), dict[int, torch.optim.Adam]()
    shares = {"before": Shares(counts, seed=config.seed), "after": Shares(counts, seed=config.seed)}
    with progress("reading held-out prompts", _tokens(held_out)) as advance:
        measured = list(dense_rows(model, held_out, cut, layers=list(indices), seed=seed, advance=advance))
    scales = {layer: one.scale for layer, one in measured[0].items()}
    for one in measured:
        shares["before"].add(one, indices)
    curve = {layer: list[float]() for layer in indices}
    for part, share in _rounds(model, prompts, cut, list(indices), seed + 1, held_bytes, progress):
        updates = max(1, round(steps * share))
        with progress("training the index", updates * len(indices)) as advance:
            for layer in indices:
                examples = [one[layer] for one in part]
                if layer not in trained:
                    first = better_start(copy.deepcopy(indices[layer]).float(), examples, scales[layer])
                    trained[layer] = first.requires_grad_()
                    optimizers[layer] = torch.optim.Adam(first.parameters(), learning_rate)
                index, optimizer = trained[layer], optimizers[layer]
                order = Random(f"{seed}/{layer}")
                for _ in range(updates):
                    step = len(curve[layer])
                    rate = FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
                    for group in optimizer.param_groups:
                        group["lr"] = learning_rate * rate
                    loss = index_loss(index, order.choice(examples))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    curve[layer].append(loss.item())
                    on_step(layer, step, curve[layer][-1])
                    advance(1)
    with torch.no_grad():
        for layer, index in trained.items():
            for mine, new in zip(indices[layer].parameters(), index.parameters(), strict=True):
                mine.copy_(new)
    for one in measured:
        shares["after"].add(one, indices)
    return {
        "steps": steps, "learning_rate": learning_rate, "rows": rows, "block": config.block, "window": config.window,
        "tokens": _tokens(prompts), "held_out": len(held_out),
        "loss": {str(layer): {"first": x[0], "last": x[-1]} for layer, x in curve.items()},
        **{name: one.to_json() for name, one in shares.items()},
    }  # fmt: skip


def _rounds(
    model: Any, prompts: Sequence[Prompt], cut: Cut, layers: Sequence[int], seed: int, most: int, progress: Progress
) -> Iterator[tuple[list[dict[int, Example]], float]]:
    """Examples of as many prompts as memory holds at a time, at least one, and their share of all prompts."""
    held, size = list[dict[int, Example]](), 0
    with (
        progress("reading densely", _tokens(prompts)) as advance,
        closing(dense_rows(model, prompts, cut, layers=layers, seed=seed, advance=advance)) as read,
    ):
        for number, rows in enumerate(read, 1):
            held.append({layer: Example.of(one) for layer, one in rows.items()})
            size += sum(one.nbytes for one in held[-1].values())
            if number < len(prompts) and size * (1 + 1 / len(held)) > most:
                yield held, len(held) / len(prompts)
                held, size = [], 0
    yield held, len(held) / len(prompts)


def _tokens(prompts: Sequence[Prompt]) -> int:
    return sum(len(prompt.tokens) for prompt in prompts)
