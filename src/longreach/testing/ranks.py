"""Run a function on several gloo ranks, each a process of its own on this machine, and get what they return.

Ranks meet in a file, not at a port, so that any number of launches can run at the same time.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any


class RankFailed(RuntimeError):
    """A rank ended with an error, or the ranks did not end in time; what they printed is in the message."""


def run_on_ranks(function: str, *arguments: Any, world: int = 2, seconds: float = 120.0) -> list[Any]:
    """[function(rank, world, *arguments) of each rank], in a gloo process group of `world` ranks on the CPU.

    function: "package.module:name", importable in a fresh process whose path is this one's; arguments and results
    are pickled. One thread a rank. Raises RankFailed; the other ranks are then stopped.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as place:
        folder = Path(place)
        (folder / "arguments").write_bytes(pickle.dumps(arguments))
        ranks = [_start(function, rank, world, folder, seconds) for rank in range(world)]
        try:
            _wait(ranks, folder, time.monotonic() + seconds)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world)]


def _start(function: str, rank: int, world: int, folder: Path, seconds: float) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
    }
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # host names need not resolve
    command = [sys.executable, "-m", __name__, function, str(rank), str(world), str(folder), str(seconds)]
    with (folder / f"output-{rank}").open("wb") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


def _wait(ranks: list[subprocess.Popen[bytes]], folder: Path, deadline: float) -> None:
    while any(process.poll() is None for process in ranks):
        if time.monotonic() > deadline or any(process.poll() for process in ranks):
            break
        time.sleep(0.02)
    if all(process.poll() == 0 for process in ranks):
        return
    time.sleep(0.2)  # the others may be about to say why, too
    said = []
    for rank, process in enumerate(ranks):
        state = "was still running" if process.poll() is None else f"ended with {process.returncode}"
        output = (folder / f"output-{rank}").read_text(errors="replace").strip().splitlines()
        said.append("\n".join([f"rank {rank} {state}:", *output[-30:]]))
    raise RankFailed("\n".join(said))


def _main(function: str, rank: int, world: int, folder: Path, seconds: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    meeting = (folder / "meeting").as_uri()
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=world, timeout=timedelta(seconds=seconds)
    )
    module, _, name = function.partition(":")
    arguments = pickle.loads((folder / "arguments").read_bytes())
    result = getattr(import_module(module), name)(rank, world, *arguments)
    (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()  # no rank ends while another still needs it
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), float(sys.argv[5]))
