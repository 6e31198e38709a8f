"""Times of sampled and selected attention on a CPU: MagicPIG's step beside torch's dense forms, and tokens of mini.

`python -m longreach.bench.cpu_sampling --output FILE`; needs the extra `cpu`, 6 GB of memory, and a machine that does
nothing else.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from longreach.bench.cpu import decode, sampling
from longreach.bench.cpu.conditions import flush_bytes, places_threads
from longreach.bench.cpu.other import AVX2
from longreach.errors import Unsupported
from longreach.ops.impl import compiles
from longreach.records import check_writable, environment, write
from longreach.records.sources import source_hash

FORMAT = 2
CONTEXTS = (32768, 98304)
DECODED = 16384
SOURCES = ("cpu_kernels",)


def measure(
    contexts: list[int], threads: list[int], rounds: int, decoded: int, repeats: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """The record but for where it was measured. decoded: tokens of the model's context, 0 for none."""
    if not compiles(torch.device("cpu")):
        raise Unsupported("the kernels that are timed here need Numba: pip install 'longreach[cpu]'")
    busy = {"start": os.getloadavg()[0]}
    cases = sampling.measure(contexts, threads, rounds, say)
    busy["sampling"] = os.getloadavg()[0]
    tokens = decode.measure(decoded, repeats, say) if decoded else None
    busy["decode"] = os.getloadavg()[0]
    return {
        "kind": "cpu sampling", "format": FORMAT,
        **({"model": tokens.pop("model")} if tokens else {}),
        "config": {"contexts": contexts, "threads": threads, "rounds": rounds, "decoded": decoded, "repeats": repeats,
                   "seed": sampling.SEED, "other_cpu": AVX2, "overwritten_bytes": flush_bytes(),
                   "threads_placed": places_threads()},
        "load_average_after": busy,  # of a minute: above the threads' number, others were at work too
        "sampling": cases, "decode": tokens,
        "numba": {package: metadata.version(package) for package in ("numba", "llvmlite")},
    }  # fmt: skip


def table(record: dict[str, Any]) -> str:
    """All cases, and targets that were missed."""
    lines = [sampling.line(case) for case in record["sampling"]]
    found = record["decode"]["methods"] if record["decode"] else []
    lines += [decode.line(each) for each in found]
    missed = [
        f"missed: {sampling.line(case).split(' ms')[0].strip()}: {name} {case['ratios'][name]:.2f}, "
        f"wanted {target['wanted']}"
        for case in record["sampling"]
        for name, target in case["targets"].items()
        if not target["met"]
    ]
    missed += [
        f"missed: decode {each['method']['name']}: {each['ratio']:.2f}, wanted {each['target']['wanted']}"
        for each in found
        if not each.get("target", {"met": True})["met"]
    ]
    return "\n".join([*lines, *missed])


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m longreach.bench.cpu_sampling", description="Sampling on a CPU.")
    parser.add_argument("--contexts", type=int, nargs="*", default=list(CONTEXTS), metavar="KEYS")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}), metavar="N")
    parser.add_argument("--rounds", type=int, default=12, help="calls of each that are timed")
    parser.add_argument(
        "--decoded", type=int, default=DECODED, metavar="TOKENS", help="context of mini; 0: leave it out"
    )
    parser.add_argument("--repeats", type=int, default=5, help="answers of each method that are timed")
    parser.add_argument("--output", type=Path, required=True, help="the record")
    args = parser.parse_args(argv)
    check_writable(args.output)
    torch.set_num_threads(max(args.threads))
    record = measure(
        args.contexts, args.threads, args.rounds, args.decoded, args.repeats, lambda line: print(line, flush=True)
    )
    sources = {name: source_hash(name) for name in SOURCES}
    write(args.output, {**record, **environment("cpu"), "sources": sources})
    print(f"\n{table(record)}", flush=True)


if __name__ == "__main__":
    main()
