"""Random codes of blocks, and the choice of blocks in plain loops, in fp64."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longreach.ops import KVView, Rows
from longreach.testing.inputs import random_kv, random_rows
from longreach.testing.tolerance import unit_roundoff


@dataclass(frozen=True)
class Case:
    rows: Rows
    blocks: KVView
    start: Tensor | None
    stop: Tensor
    options: dict[str, Any]


def make_case(seed: int, *, half: torch.dtype = torch.bfloat16, ties: bool = False) -> Case:
    """Any combination of what recall promises, small. ties: codes of signs, as hashes make them."""
    dice, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    blocks = random_kv(
        [dice.choice((0, 1, 2, 7, 16, 17, 40, 70)) for _ in range(dice.choice((1, 2, 3)))],
        heads=dice.choice((1, 2, 3)), dim=dice.choice((8, 24, 64)), page=dice.choice((None, None, 1, 3, 16)),
        memory=dice.choice(("plain", "packed", "tokens")), dtype=dice.choice((half, torch.float16, torch.float32)),
        ints=dice.choice((torch.int32, torch.int64)), seed=seed,
    )  # fmt: skip
    rows = random_rows(blocks, dice.choice((0, 1, 2, 5, 9)), group=dice.choice((1, 2, 3, 4, 7, 8)), seed=seed)
    held = blocks.seq_lens[rows.seq.long()]
    stop = (torch.rand(held.shape, generator=draw) * (held + 1)).to(held.dtype).minimum(held)
    start = (torch.rand(held.shape, generator=draw) * (stop + 2)).to(held.dtype) if dice.random() < 0.5 else None
    if ties:
        rows = Rows(signs(rows.q), rows.seq, rows.pos)
        k = torch.where(blocks.k.isnan(), blocks.k, signs(blocks.k))
        blocks = KVView(k, k, blocks.seq_lens, blocks.block_table)
    options = {
        "count": dice.choice((1, 2, 3, 8, 33, 64)), "scale": dice.choice((0.1, 0.35, 1.0)),
        "pool": dice.choice(("softmax", "sum")),
    }  # fmt: skip
    return Case(rows, blocks, start, stop, options)


def signs(x: Tensor) -> Tensor:
    return torch.where(x >= 0, 1.0, -1.0).to(x.dtype)


def code_of(blocks: KVView, seq: int, block: int, head: int) -> Tensor:
    """fp64 [F]."""
    page = seq if blocks.block_table is None else int(blocks.block_table[seq, block // blocks.page])
    return blocks.k[page, head, block % blocks.page].double()


def exact_scores(case: Case, row: int, head: int) -> dict[int, tuple[float, float]]:
    """(score, error bound) of each block that the row may choose.

    Bound: an fp32 logit errs by up to F u times the sum of its products' sizes, and a softmax of such logits by that
    times its value on both sides of the fraction, with a few roundings more.
    """
    group = case.blocks.group(case.rows)
    stop, start = int(case.stop[row]), 0 if case.start is None else int(case.start[row])
    found = {n: (0.0, 0.0) for n in range(start, stop)}
    codes = {n: code_of(case.blocks, int(case.rows.seq[row]), n, head) for n in found}
    unit = 4 * unit_roundoff(torch.float32)
    softmax, scale = case.options["pool"] == "softmax", case.options["scale"]
    for h in range(head * group, (head + 1) * group):
        q = case.rows.q[row, h].double() * (scale if softmax else 1.0)
        logits = {n: float((q * k).sum()) for n, k in codes.items()}
        errors = {n: (len(q) + 2) * unit * float((q * k).abs().sum()) for n, k in codes.items()}
        if softmax:
            total = math.fsum(math.exp(x - max(logits.values())) for x in logits.values())
            worst = max(errors.values(), default=0.0)
            logits = {n: math.exp(x - max(logits.values())) / total for n, x in logits.items()}
            errors = {n: x * (2 * worst + (len(found) + 8) * unit) for n, x in logits.items()}
        for n in found:
            found[n] = found[n][0] + logits[n], found[n][1] + errors[n] + unit * abs(logits[n]) * group
    return found if softmax else {n: (scale * x, abs(scale) * error) for n, (x, error) in found.items()}


def check(case: Case, index: Tensor, used: Tensor, *, exact: bool = False) -> None:
    """The result is a set of highest scores, in order. exact: of the scores as they are, the later of equal ones."""
    rows, heads, count = case.rows.q.shape[0], case.blocks.heads, case.options["count"]
    assert index.shape == (rows, heads, count) and used.shape == (rows, heads)
    assert index.dtype == used.dtype == torch.int32 and not index.requires_grad
    for row in range(rows):
        for head in range(heads):
            scores = exact_scores(case, row, head)
            chosen = index[row, head, : int(used[row, head])].tolist()
            assert len(chosen) == min(count, len(scores))
            assert chosen == sorted(set(chosen)) and set(chosen) <= set(scores)
            assert not bool(index[row, head, len(chosen) :].any())
            if exact:
                best = sorted(scores, key=lambda n: (scores[n][0], n), reverse=True)[:count]
                assert chosen == sorted(best)
                continue
            left = [n for n in scores if n not in chosen]
            for n in left:
                for c in chosen:
                    assert scores[n][0] - scores[n][1] <= scores[c][0] + scores[c][1], (row, head, n, c)


def blocks_held(kv: KVView, per: int) -> list[tuple[int, int]]:
    """(sequence, block) of the complete blocks."""
    return [(b, n) for b in range(kv.sequences) for n in range(int(kv.seq_lens[b]) // per)]


def keys_of_block(kv: KVView, seq: int, block: int, per: int) -> Tensor:
    """[G, per, D]."""
    found = []
    for slot in range(block * per, (block + 1) * per):
        page = seq if kv.block_table is None else int(kv.block_table[seq, slot // kv.page])
        found.append(kv.k[page, :, slot % kv.page])
    return torch.stack(found, 1)
