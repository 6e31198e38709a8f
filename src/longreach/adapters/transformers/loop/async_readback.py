"""Tokens from the device to the host without waiting for the step under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

AHEAD = 3  # steps that may be under way while the host still waits for an earlier one's tokens


class _AtOnce:
    """On the CPU tokens are there when they are made."""

    def __init__(self) -> None:
        self.noted: deque[Tensor] = deque()

    @property
    def pending(self) -> int:
        return len(self.noted)

    def note(self, token: Tensor) -> None:
        self.noted.append(token.clone())

    def ready(self, last: bool) -> Iterator[Tensor]:
        while self.noted:
            yield self.noted.popleft()


class _Late:
    """Copies go to pinned memory behind their step; the host waits for one when `ahead` younger ones are queued."""

    def __init__(self, token: Tensor, ahead: int):
        self.ahead, self.device = ahead, token.device
        self.noted: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self.buffers = [torch.empty(token.shape, dtype=token.dtype, pin_memory=True) for _ in range(ahead + 2)]
        self.count = 0

    @property
    def pending(self) -> int:
        return len(self.noted)

    def note(self, token: Tensor) -> None:
        buffer = self.buffers[self.count % len(self.buffers)]
        self.count += 1
        buffer.copy_(token, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self.noted.append((buffer, event))

    def ready(self, last: bool) -> Iterator[Tensor]:
        """last: no step follows, so all that is under way is waited for."""
        while self.noted and (last or len(self.noted) > self.ahead):
            buffer, event = self.noted.popleft()
            event.synchronize()
            yield buffer.clone()


def read_back(token: Tensor, ahead: int | None = None) -> _AtOnce | _Late:
    """A reader that brings the tokens [B] of every step to the host. ahead: steps in flight, by default AHEAD."""
    return _Late(token, AHEAD if ahead is None else ahead) if token.device.type == "cuda" else _AtOnce()
