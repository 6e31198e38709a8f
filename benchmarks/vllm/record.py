"""One record from the lines of measure.py.

python3 benchmarks/vllm/record.py LINES ... --out RECORD

All lines have the same commit, versions and kind of GPU, and no measurement occurs twice. A target is the speed-up over
vLLM's FLASH_ATTN, in the first value that measure.py prints. Both engines must have the same set-up.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import measure

from longreach.errors import InvalidInput
from longreach.records import write

FORMAT = 2
SAME = ("commit", "dirty", "versions", "layers")
ENGINE = (
    "method", "ranks", "device", "visible_gpus", "started_at", "start_seconds", "options", "read_of_dense",
    "allocations_since_start",
)  # fmt: skip


def record(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The record. Raises InvalidInput for lines of different runs, and for a measurement that occurs twice."""
    facts = {name: {json.dumps(line[name]) for line in lines} for name in SAME}
    facts["GPU"] = {line["device"]["name"] for line in lines}
    mixed = [f"{name} {sorted(values)}" for name, values in facts.items() if len(values) != 1]
    if mixed:
        raise InvalidInput(f"lines of one record must agree, and these differ in {'; '.join(mixed)}")
    timed = [line for line in lines if line["case"] in measure.CASES]
    counts = Counter((line["case"], line["method"], line["batch"]) for line in timed)
    twice = [f"{case} of {method} with batch {batch}" for (case, method, batch), n in counts.items() if n > 1]
    if twice:
        raise InvalidInput(f"a record holds each measurement once, and these are there twice: {', '.join(twice)}")
    first = lines[0]
    names = [name for name in measure.CASES if any(line["case"] == name for line in timed)]
    return {
        "kind": "vllm times", "format": FORMAT, "commit": first["commit"], "dirty": first["dirty"],
        "python": first["python"], "versions": first["versions"],
        "device": {"type": "cuda", "name": first["device"]["name"]},
        "model": {"shape": "Llama-3.1-8B", "weights": "random", "layers": first["layers"]},
        "engines": engines(lines), "cases": {name: case(name, lines) for name in names},
    }  # fmt: skip


def engines(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry for each engine: its set-up, its start time, and its reads and allocations over all of its cases."""
    last: dict[tuple[str, float], dict[str, Any]] = {}
    for line in lines:
        key = line["method"], line["started_at"]
        last[key] = last.get(key, {}) | line
    return [{name: line[name] for name in ENGINE if name in line} for line in last.values()]


def case(name: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """One case: its measurements, and the speed-up of each method over FLASH_ATTN.

    Raises InvalidInput if the set-ups of the two engines differ.
    """
    mine, spec = [line for line in lines if line["case"] == name], measure.CASES[name]
    left_out = {"case", "context", "python", *SAME, *ENGINE} - {"method"}
    targets = []
    for line in mine:
        base, got = measure.baseline_of(line, mine), measure.speedups(line, mine).get(measure.SHOWN[spec.kind][0])
        if not base or not got:
            continue
        if base["options"] != line["options"]:
            differing = [key for key, value in base["options"].items() if line["options"].get(key) != value]
            raise InvalidInput(
                f"{name}: the engines of {line['method']} and {measure.PLAIN} differ in {', '.join(differing)}; "
                f"measure both with the same cases"
            )
        who = f"{line['method']}, batch {measure.case_and_batch(line)[1]}"
        target = {"of": who, "quantity": "speed over", "over": measure.PLAIN, "got": got}
        bound = measure.target_of(line)
        if bound:
            target |= {"bound": bound, "reached": got >= bound}
        targets.append(target)
    return {
        "context": spec.context, "ranks": spec.ranks, "targets": targets,
        "measurements": [{key: value for key, value in line.items() if key not in left_out} for line in mine],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", nargs="+", type=Path, help="files that measure.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    try:
        write(given.out, record([json.loads(line) for path in given.lines for line in path.read_text().splitlines()]))
    except InvalidInput as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
