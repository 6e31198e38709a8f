"""One record from the lines of measure.py.

python3 benchmarks/vllm/record.py LINES ... --out RECORD

All lines are of one commit, one kind of GPU and one vLLM. A target says how many times as fast as vLLM's FLASH_ATTN a
method is, in the first of the times that measure.py prints.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import measure

from longreach.errors import InvalidInput
from longreach.records import write

SAME = ("commit", "dirty", "gpu", "vllm", "torch", "layers")
ENGINE = ("method", "ranks", "start_seconds", "read_of_dense", "allocations_since_start")


def record(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The record. Raises InvalidInput if lines do not belong together."""
    facts = {name: {line[name] for line in lines} for name in SAME}
    mixed = [f"{name} {sorted(map(str, values))}" for name, values in facts.items() if len(values) != 1]
    if mixed:
        raise InvalidInput(f"lines of one record must agree, these differ in {'; '.join(mixed)}")
    (fact,) = ({name: line[name] for name in SAME} for line in lines[:1])
    names = [name for name in measure.CASES if any(line["case"] == name for line in lines)]
    return {
        "kind": "vllm times", "format": 1, "commit": fact["commit"], "dirty": fact["dirty"],
        "versions": {"vllm": fact["vllm"], "torch": fact["torch"]}, "device": {"type": "cuda", "name": fact["gpu"]},
        "model": {"shape": "Llama-3.1-8B", "weights": "random", "layers": fact["layers"]},
        "plan": {"anchors": list(measure.ANCHORS), "head_map": "random"},
        "captured": list(measure.CAPTURED), "engines": engines(lines),
        "cases": {name: case(name, lines) for name in names},
    }  # fmt: skip


def engines(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is known of each engine once it has run all of its cases."""
    last: dict[tuple[str, float], dict[str, Any]] = {}
    for line in lines:
        of = line["method"], line["start_seconds"]
        last[of] = last.get(of, {}) | line
    return [{name: line[name] for name in ENGINE if name in line} for line in last.values()]


def case(name: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    mine, spec = [line for line in lines if line["case"] == name], measure.CASES[name]
    left_out = {"case", "context", *SAME, *ENGINE} - {"method"}
    targets = []
    for line in mine:
        bound, ratios = measure.least(line), measure.over_plain(line, mine)
        got = ratios.get(measure.SHOWN[spec.kind][0])
        if got is not None:
            who = f"{line['method']}, batch {measure.place(line)[1]}"
            reached = {} if bound is None else {"bound": bound, "reached": got >= bound}
            targets.append({"of": who, "quantity": "speed over", "over": measure.PLAIN, "got": got, **reached})
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
