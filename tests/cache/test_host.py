"""Host memory for keys and values: what it holds, when it is freed, and what is said where there is none."""

from __future__ import annotations

import gc
import mmap
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach.cache import host
from longreach.cache.host import Registered, allocate, available_bytes, check_available
from longreach.errors import CapacityError, Unsupported

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class FakeRuntime:
    """CUDA's functions for host memory. code: what registering returns."""

    def __init__(self, code: int = 0):
        self.code, self.registered, self.waited = code, dict[int, int](), 0
        self.capturing = False

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if self.code == 0:
            self.registered[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        assert self.waited, "kernels may still use it"
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return f"error {code}"

    def synchronize(self, device: torch.device) -> None:
        self.waited += 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], FakeRuntime]]:
    def install(code: int = 0) -> FakeRuntime:
        fake = FakeRuntime(code)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
        return fake

    yield install
    assert not host._waiting


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_memory_is_zero_and_begins_at_a_huge_page(dtype: torch.dtype) -> None:
    x = allocate((3, 2, 700, 8), dtype, CPU)
    assert x.shape == (3, 2, 700, 8) and x.dtype == dtype and x.is_contiguous()
    assert x.data_ptr() % host.HUGE_PAGE == 0 and not x.any()
    x[2, 1, 699] = 7
    assert x.sum() == 7 * 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_reads_memory_that_is_not_pinned() -> None:
    x = allocate((1, 1, 4, 4), torch.float32, CPU)
    x[0, 0, 1, 2] = 7
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads that the child lacks; it needs none
        child = os.fork()
    if not child:
        os._exit(int(x[0, 0, 1, 2]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_memory_goes_with_the_last_tensor(cuda: Callable[[int], FakeRuntime]) -> None:
    fake = cuda(0)
    memory = host._touched(5000)
    registered = Registered(memory, GPU)
    assert fake.registered == {memory.data_ptr(): 5000}
    assert registered.__cuda_array_interface__["data"] == (memory.data_ptr(), False)
    assert registered.__cuda_array_interface__["shape"] == (5000,)
    del memory
    gc.collect()
    assert fake.registered, "it is still referred to"
    del registered
    gc.collect()
    assert not fake.registered and fake.waited


def test_memory_freed_during_a_capture_waits_for_its_end(cuda: Callable[[int], FakeRuntime]) -> None:
    fake = cuda(0)
    first = Registered(host._touched(5000), GPU)
    fake.capturing = True
    del first
    gc.collect()
    assert len(fake.registered) == 1 and not fake.waited
    fake.capturing = False
    second = Registered(host._touched(3000), GPU)
    assert list(fake.registered.values()) == [3000]
    del second


def test_memory_that_cannot_be_pinned_is_refused(
    cuda: Callable[[int], FakeRuntime], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = cuda(2)
    monkeypatch.setattr(host, "available_bytes", lambda: 3 << 30)
    monkeypatch.setattr(host, "_forget_error", lambda device: None)
    with pytest.raises(CapacityError, match=r"1\.00 MiB of host memory .* could not be pinned .*error 2.*3\.00 GiB are "
                       r"free, but a container or the driver .*\. Lower the batch.*host=False"):  # fmt: skip
        allocate((1, 1, 1 << 18, 1), torch.float32, GPU)
    assert not fake.registered and not fake.waited


def test_a_device_that_copies_host_memory_is_refused(
    cuda: Callable[[int], FakeRuntime], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = cuda(0)
    monkeypatch.setattr(torch, "as_tensor", lambda x, device: torch.zeros(4))
    with pytest.raises(Unsupported, match="cannot read host memory in place"):
        allocate((1, 1, 4, 1), torch.float32, GPU)
    gc.collect()
    assert not fake.registered


def test_a_system_without_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: Any, **options: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", none)
    with pytest.raises(CapacityError, match=r"the system gave no 0\.06 KiB of host memory .*Cannot allocate"):
        allocate((1, 1, 16, 1), torch.float32, CPU)


def test_too_little_memory_is_found_before_any_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: 1 << 30)
    check_available(1 << 30)
    with pytest.raises(CapacityError, match=r"need 2\.00 GiB of host memory, and 1\.00 GiB are free; nothing was"):
        check_available(2 << 30)
    monkeypatch.setattr(host, "available_bytes", lambda: None)
    check_available(1 << 60)  # of an unknown system nothing is known


def test_what_is_free_is_the_least_of_system_and_control_groups(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    assert available_bytes(tmp_path) is None
    write("proc/meminfo", "MemTotal:       9000 kB\nMemAvailable:   8000 kB\n")
    assert available_bytes(tmp_path) == 8000 * 1024
    write("proc/self/cgroup", "0::/a/b\n")
    assert available_bytes(tmp_path) == 8000 * 1024  # the group has no files here
    for group, limit in (("a", "5000000"), ("a/b", "max")):
        write(f"sys/fs/cgroup/{group}/memory.max", limit + "\n")
        write(f"sys/fs/cgroup/{group}/memory.current", "3000000\n")
        write(f"sys/fs/cgroup/{group}/memory.stat", "anon 1\ninactive_file 1000000\n")
    assert available_bytes(tmp_path) == 3_000_000
    write("proc/self/cgroup", "7:pids:/a\n4:memory:/c\n")
    write("sys/fs/cgroup/memory/c/memory.limit_in_bytes", "2000000\n")
    write("sys/fs/cgroup/memory/c/memory.usage_in_bytes", "1500000\n")
    write("sys/fs/cgroup/memory/c/memory.stat", "total_inactive_file 100000\n")
    assert available_bytes(tmp_path) == 600_000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_reads_and_writes_host_memory_in_place() -> None:
    x = allocate((2, 2, 4096, 64), torch.bfloat16, GPU)
    address = x.data_ptr()
    assert x.device == GPU and not x.any() and x.data_ptr() % host.HUGE_PAGE == 0
    want = torch.randn(2, 2, 4096, 64, device=GPU).bfloat16()
    x.copy_(want)
    rows = torch.randint(4096, (100,), device=GPU)
    assert torch.equal(x[:, :, rows], want[:, :, rows])
    y: Tensor | None = x[1].clone()
    assert y is not None and y.data_ptr() != address and torch.equal(y, want[1])
    view = x[0]
    del x
    gc.collect()
    assert torch.equal(view, want[0]), "a view keeps the memory"
    del view
    again = [allocate((1, 1, 1 << 20, 8), torch.bfloat16, GPU) for _ in range(3)]
    assert len({z.data_ptr() for z in again}) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_that_cuda_refuses_to_pin_leaves_the_gpu_usable() -> None:
    first = host._touched(1 << 21)
    kept = Registered(first, GPU)
    with pytest.raises(CapacityError, match="could not be pinned"):
        Registered(first, GPU)  # registered already
    assert torch.ones(3, device=GPU).sum() == 3
    del kept
