"""How much rounding may change a step over the drawn keys, and which keys each layer of it attended to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from longreach.adapters.transformers import LongreachCache
from longreach.bench.case import Case
from longreach.bench.check_method import KeysOf, attended
from longreach.bench.check_step import passes, relative
from longreach.bench.decoding import Decoding
from longreach.bench.host.fill import sampled_kv
from longreach.bench.magicpig.lists import attended_keys
from longreach.bench.memory import release
from longreach.methods.base import AttentionMethod
from longreach.methods.call import LayerCall
from longreach.methods.magicpig import MagicPIG
from longreach.methods.magicpig.state import LayerTables
from longreach.ops import Selection

KEYS = 1 << 17  # of one sequence, over which rounding is measured: its keys and values in fp32 lie in GPU memory
TOKENS = 4  # whose logits are compared
HOW = (
    "One step more runs uncaptured. In every layer its attention is compared with fp64 over the keys that the method "
    "chose (first and last sequence, first and last KV head); for MagicPIG these are the keys and weights that its "
    "four ops find. Its logits are compared with those of the timed step (recorded only for magicpig, as rounding "
    "changes its sample) and of a step captured without compiled parts. The bound of logits follows from the rounding "
    f"error of the model's own pass, over at most {KEYS} of the keys of one sequence."
)


def rounding_error(bench: Decoding, case: Case, model: Any) -> float:
    """The error of a step's logits that rounding explains (relative, norms), as `check_step.require_right` has it.

    Cases that differ in the batch alone share it: it is of one sequence.
    """
    tokens = min(case.shape.context, KEYS)
    one = replace(case, shape=replace(case.shape, batch=1, context=tokens))
    name = f"rounding error: {one.shape} {case.model}"
    if name not in bench.shared:
        plain, exact = passes(model, tokens, bench.tokens(one, model, TOKENS), bench.seed, draw=sampled_kv)
        release(bench.device)
        bench.shared[name] = 2 * relative(plain, exact) + torch.finfo(plain.dtype).eps
    return float(bench.shared[name])


def keys_of(name: str, cache: LongreachCache, method: AttentionMethod) -> KeysOf:
    """The keys with values in a layer's output. MagicPIG's kernels make no lists, so its four ops find them again.

    name: of what is measured, for errors.
    """
    if not isinstance(method, MagicPIG):
        return attended

    def found(call: LayerCall) -> tuple[Selection, ...]:
        for state in cache.states.states((method,), call.layer):
            assert isinstance(state, LayerTables)
            return attended_keys(name, call, method, state, call.impl)
        return attended(call)  # a dense layer

    return found
