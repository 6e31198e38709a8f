"""A streamer that records the times of tokens, the peak memory until the first one, and the launches of a token."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import pairwise

import torch
from torch import Tensor

from longreach.bench.launches import Profile, complete, each, observed
from longreach.bench.memory import peak_bytes, reset_peak
from longreach.errors import InvalidInput
from longreach.records.launches import Launched


class Clock:
    """For one `generate`. times: seconds at which the prompt came back, then each token.

    profiled: (first, count): observe launches from the arrival of token `first` (1 is the first one) until that of the
    one `count` later. Tokens past `first` are not timed. launched: what one of them launches.
    at: number of a token -> what is called when it has come, the prompt being number 0.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        profiled: tuple[int, int] | None = None,
        at: Mapping[int, Callable[[], object]] | None = None,
    ):
        self.times: list[float] = []
        self.at = at or {}
        self.device, self._profiled = device or torch.device("cpu"), profiled
        self._profile, self._observing = Profile(self.device), ExitStack()
        self.launched = Launched()
        self.prefill_peak: int | None = None

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        token = len(self.times) - 1
        self.at.get(token, lambda: None)()
        if token == 1:
            self.prefill_peak = peak_bytes(self.device)
            reset_peak(self.device)
        if self._profiled and token == self._profiled[0]:
            self._seen = self._observing.enter_context(observed())
            self._profile.start()
        if self._profiled and token == sum(self._profiled):
            count = self._profiled[1]
            kernels = self._profile.stop(count)
            self._observing.close()
            triton = each(self._seen.all, count)
            self.launched = Launched(triton, complete(kernels, triton))

    def end(self) -> None:
        return None

    def close(self) -> None:
        """Stop observing, where the tokens ended early."""
        self._profile.stop()
        self._observing.close()

    def steps(self, count: int) -> list[float]:
        """Seconds between each of the last `count` tokens and the one before; of those that came unprofiled."""
        last = self.times[: self._profiled[0] + 1 if self._profiled else None][-count - 1 :]
        if len(last) != count + 1:
            raise InvalidInput(f"expected {count} tokens and one before them, {len(self.times)} came")
        return [b - a for a, b in pairwise(last)]
