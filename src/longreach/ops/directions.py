"""Random directions that are the same on every platform, for codes made of signs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from longreach.ops.types import require


def directions(*shape: int, seed: int) -> Tensor:
    """Standard normal numbers, bf16, on the CPU. seed: in [0, 2^32).

    Drawn in fp64 by NumPy's RandomState, whose stream is frozen, and rounded to bf16. So one seed gives the same
    numbers on every device and platform, and with every version of torch; a cast of a checkpoint does not change them.
    """
    ok = isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 1 << 32
    require(ok, lambda: f"seed: expected an int in [0, 2^32), got {seed!r}")
    return torch.from_numpy(np.random.RandomState(seed).standard_normal(shape)).to(torch.bfloat16)
