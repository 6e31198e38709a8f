"""Calls of the CPU outside of a capture: buffers, jobs, and the word that programs write errors to."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from longreach.errors import HostCallFailed
from longreach.ops.host_calls import MESSAGES, HostCalls

CPU = torch.device("cpu")


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(tuple(shape), dtype=dtype, device=device)


def new() -> HostCalls:
    return HostCalls(CPU, allocate)


def test_equal_arguments_give_one_buffer() -> None:
    calls = new()
    first = calls.buffer("q", (2, 3), torch.float32)
    assert first.shape == (2, 3)
    assert calls.buffer("q", (2, 3), torch.float32).data_ptr() == first.data_ptr()
    others = [calls.buffer("k", (2, 3), torch.float32), calls.buffer("q", (3, 2), torch.float32)]
    others.append(calls.buffer("q", (2, 3), torch.int32))
    assert len({x.data_ptr() for x in (first, *others)}) == 4 and calls.nbytes == 4 * 6 * 4
    assert calls.buffer("none", (0, 3), torch.float32).shape == (0, 3)
    assert calls.scratch("a", 20) == calls.scratch("a", 20) != calls.scratch("b", 20)


def test_tensors_are_sent_as_they_are_then() -> None:
    calls, x = new(), torch.arange(6).view(2, 3)
    (address,) = calls.send(("x", x.T))  # not contiguous
    x.zero_()
    assert calls.buffer("x", (3, 2), torch.int64).data_ptr() == address
    assert calls.buffer("x", (3, 2), torch.int64).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_job_is_called_by_its_address_and_kept_once() -> None:
    calls, seen = new(), list[int]()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def program(address: int) -> None:
        seen.append(ctypes.c_int64.from_address(address).value)

    function = ctypes.cast(program, ctypes.c_void_p).value
    assert function is not None
    for value in (7, 7, 8):
        calls.call(function, np.array([value], np.int64))
    assert seen == [7, 7, 8] and len(calls._jobs) == 2


@pytest.mark.parametrize("code", [*MESSAGES, 99])
def test_an_error_is_raised_once_by_the_call_that_made_it(code: int) -> None:
    calls = new()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def program(address: int) -> None:
        ctypes.c_int64.from_address(calls.status).value = code

    function = ctypes.cast(program, ctypes.c_void_p).value
    assert function is not None
    with pytest.raises(HostCallFailed, match=MESSAGES.get(code, "error 99")):
        calls.call(function, np.zeros(1, np.int64))
    calls.check()
    calls._status[0] = code
    calls.clear()
    calls.check()
