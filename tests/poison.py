"""Memory that nobody has written holds NaN, so that reading it shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from longreach.cache import tiers


@contextmanager
def nan_memory() -> Iterator[None]:
    """Within this block, `new_empty` of floats gives NaN (the caches allocate by it), and so does host memory."""
    plain, host = torch.Tensor.new_empty, tiers.allocate

    def new_empty(self: Tensor, *size: Any, **options: Any) -> Tensor:
        if not options.get("dtype", self.dtype).is_floating_point:
            return plain(self, *size, **options)
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        return self.new_full(tuple(shape), torch.nan, **options)

    def allocate(shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        found = host(shape, dtype, device)
        return found.fill_(torch.nan) if dtype.is_floating_point else found

    with patch.object(torch.Tensor, "new_empty", new_empty), patch.object(tiers, "allocate", allocate):
        yield
