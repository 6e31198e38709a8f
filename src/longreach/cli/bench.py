"""`longreach bench`: measure named cases against other kernels, keep records, check them, write README's numbers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longreach.cli.common import add_json, positive, seed
from longreach.cli.show import Column, Table, console, emit, progress
from longreach.errors import InvalidInput, LongreachError, OutOfMemory, UnknownName

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from longreach.bench.case import Case

NAME = "bench"
HELP = "measure speed against other kernels, and keep the records"
EXAMPLES = (
    "longreach bench list",
    "longreach bench run dense-decode --out runs/bench",
    "longreach bench run list-10pct-128k-b1 --quick --without flashinfer",
    "longreach bench run chunk-store --out runs/bench    (needs no GPU, but 20 GB of disk, in --out)",
    "longreach bench run --tiny --out runs/bench     (any CPU: exercises the code, measures nothing)",
    "longreach bench check    (lists records of changed kernels or of a dirty tree)",
    "longreach bench readme   (write the numbers of README, docs/quality.md and docs/speed.md, and two pictures)",
)
ACTIONS = ("list", "run", "check", "readme")
RESULTS = Path("benchmarks/results")
SHAPE = ("batch", "context", "rows", "heads", "kv_heads", "dim")
COLUMNS = (
    Column("what", 44, left=True),
    Column("us", 9),
    Column("quartiles", 17, wide=True),
    Column("rate", 12),
    Column("error", 8, wide=True),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=ACTIONS, help="what to do")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of cases or groups (run, list), of groups "
                        "(check --spot); default all")  # fmt: skip
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help=f"records (default {RESULTS})")
    parser.add_argument("--without", action="append", default=[], metavar="BASELINE", help="leave a baseline out")
    parser.add_argument("--spot", action="store_true", help="check: measure one small case of each group again, on a "
                        "GPU, and confirm the group's record if speed and launches are the same")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="fewer replays")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on the CPU too; measures nothing")
    parser.add_argument("--impl", help="attend's implementation other than the case's (triton; with "
                        "--tiny reference); the record names it")  # fmt: skip
    parser.add_argument("--seed", type=seed, default=0, help="of the inputs (default 0)")
    for name in SHAPE:
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, metavar="N", help="other than the case's; "
                            "its targets then do not apply")  # fmt: skip
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="other than the case's")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.action == "run" and args.names == ["chunk-store"]:
        return _chunk_store(args)
    action = {"list": _list, "run": _run, "check": _check, "readme": _readme}[args.action]
    if args.spot and args.action != "check":
        raise InvalidInput(f"--spot belongs to bench check, not to bench {args.action}; leave it out")
    if args.names and not args.spot and args.action in ("check", "readme"):
        raise InvalidInput(f"bench {args.action} takes no names; it reads all records in --out")
    return action(args)


def _list(args: argparse.Namespace) -> int:
    from longreach.bench.cases import choose
    from longreach.bench.format import goal

    cases = choose(args.names)
    if args.json:
        from dataclasses import asdict

        emit([asdict(case) for case in cases])
        return 0
    columns = Column("group", 13, left=True), Column("case", 22, left=True), Column("must reach", 60, left=True)
    table = Table(console(), columns)
    table.header()
    for case in cases:
        table.row([case.group, case.name, "; ".join(goal(vars(t)) for t in case.targets)])
    return 0


def _run(args: argparse.Namespace) -> int:
    from longreach.bench.baselines import baseline
    from longreach.bench.cases import choose, tiny
    from longreach.bench.record import add, conditions
    from longreach.bench.runner import Runner
    from longreach.ops.attend.api import IMPLEMENTATIONS
    from longreach.records import check_writable

    if args.impl and args.impl not in IMPLEMENTATIONS.names():
        raise UnknownName("impl of attend", args.impl, IMPLEMENTATIONS.names())
    chosen = choose(args.names)
    device, without = _where(args)
    cases = [tiny(case) if args.tiny else case for case in chosen]
    cases = [case.but(**{name: getattr(args, name) for name in (*SHAPE, "dtype")}) for case in cases]
    cases = [case.by(args.impl) if args.impl else case for case in cases]
    for name in {name for case in cases for name in case.baselines} - set(without) | set(args.without):
        baseline(name).load() if name not in without else baseline(name)
    for group in {case.group for case in cases}:
        check_writable(args.out / f"{group}.json")
    out, results, too_large = console(), {}, 0
    runner = Runner(device, without=without, quick=args.quick, say=_say(args))
    with progress("measuring", len(cases)) as advance:
        for case in cases:
            stated, path = conditions(device), args.out / f"{case.group}.json"

            def save(measured: dict[str, Any], case: Case = case, stated: Any = stated, path: Path = path) -> None:
                results[case.name] = {**stated, **measured}
                add(path, case.group, case.name, results[case.name])

            try:
                save(runner.run(case, args.seed, save))
            except OutOfMemory as error:  # the others may fit
                print(f"left out: {error}", file=sys.stderr, flush=True)
                too_large += 1
                advance(1)
                continue
            if not args.json:
                show(out, case, results[case.name])
            advance(1)
    if args.json:
        emit(results)
    return 3 if too_large else 0


def _where(args: argparse.Namespace) -> tuple[torch.device, list[str]]:
    """The device to measure on, and the baselines that are left out there. Raises InvalidInput."""
    import torch

    from longreach.bench.baselines import NAMES, ON_CPU

    gpu = torch.cuda.is_available() and not args.tiny
    if not gpu and not args.tiny:
        what = "check --spot" if args.spot else "run"
        raise InvalidInput(
            f"bench {what} needs a CUDA device; --tiny exercises it on the CPU, where times mean nothing"
        )
    if args.tiny and args.out == RESULTS:
        raise InvalidInput(f"--tiny measures nothing and belongs in no record of {RESULTS}; give --out another folder")
    missing = [] if gpu else [name for name in NAMES if name not in ON_CPU]
    return torch.device("cuda" if gpu else "cpu"), [*args.without, *missing]


def _say(args: argparse.Namespace) -> Callable[[str], None]:
    return (lambda line: None) if args.json else (lambda line: print(line, flush=True))


def _chunk_store(args: argparse.Namespace) -> int:
    """The store's own measurement: of a disk, not of a GPU."""
    from longreach.bench.chunk_store import GROUP, PASSES, TINY, Load, run
    from longreach.bench.format import goal, outcome
    from longreach.records import check_writable

    given = [name for name in (*SHAPE, "dtype", "impl", "quick", "without") if getattr(args, name)]
    if given:
        raise InvalidInput(f"chunk-store has no --{given[0].replace('_', '-')}; leave it out")
    if args.tiny and args.out == RESULTS:
        raise InvalidInput(f"--tiny measures nothing and belongs in no record of {RESULTS}; give --out another folder")
    check_writable(args.out / f"{GROUP}.json")
    load, out = TINY if args.tiny else Load(), console()

    def told(name: str, result: dict[str, Any]) -> None:
        table = Table(out, COLUMNS[:3])
        table.header()
        for entry in result.get("entries", ()):
            us = entry["microseconds"]
            table.row([f"{name}: {entry['name']}", f"{us['median']:.0f}",
                       f"{us['first_quartile']:.0f}-{us['third_quartile']:.0f}"])  # fmt: skip
        for what, seconds in result.get("seconds", {}).items():
            table.row([what, f"{seconds * 1e6:.0f}", "-"])
        for target in result.get("targets", ()):
            out.print(f"  {goal(target)}: {outcome(target)}", soft_wrap=True)

    with progress("measuring", PASSES * load.chunks) as advance:
        results = run(load, args.out, (lambda *_: None) if args.json else told, advance)
    if args.json:
        emit(results)
    return 0


def show(out: Any, case: Case, result: dict[str, Any]) -> None:
    """A case's table and what became of its targets."""
    from longreach.bench.format import goal, outcome, rate, remarks

    table = Table(out, COLUMNS)
    table.header()
    for entry in result["entries"]:
        us, error = entry["microseconds"], entry.get("error")  # None: not checked
        who = "longreach, " if entry["who"] == "longreach" else ""
        table.row([who + entry["name"], f"{us['median']:.2f}", f"{us['first_quartile']:.2f}-{us['third_quartile']:.2f}",
                   rate(entry), "-" if error is None else f"{error:.1e}"])  # fmt: skip
    if "auto" in result:
        out.print(f"  impl='auto' means {result['auto']}", soft_wrap=True)
    for remark in remarks(result):
        out.print(f"  {remark}", soft_wrap=True)
    if "limit" in result:
        shares = ", ".join(f"{e['name']} {e['share_of_limit']:.1%}" for e in result["entries"] if "share_of_limit" in e)
        out.print(f"  limit {result['limit']['microseconds']:.1f} us; reached of it: {shares}", soft_wrap=True)
    for name, why in result["baselines"].get("why", {}).items():
        out.print(f"  {name} left out: {why}", soft_wrap=True)
    for target in result["targets"]:
        out.print(f"  {goal(target)}: {outcome(target)}", soft_wrap=True)
    out.print()


def _check(args: argparse.Namespace) -> int:
    if args.spot:
        return _spot(args)
    from longreach.records.stale import stale

    found = stale(args.out)
    if args.json:
        emit([{"record": str(path), "part": part, "why": why} for path, part, why in found])
    else:
        for path, part, why in found:
            print(f"{path}{f' ({part})' if part else ''}: {why}")
        if not found:
            print(f"{args.out}: all of clean trees, speeds of these kernels, answers of the weights that are shipped")
    return 1 if found else 0


def _spot(args: argparse.Namespace) -> int:
    """Measure the spot cases of groups again, one group after another; a confirmed group is marked at once."""
    from longreach.bench.cases import CASES, SPOTS, tiny
    from longreach.bench.record import conditions, read
    from longreach.bench.runner import Runner
    from longreach.bench.spot import compare, confirmed, repeated
    from longreach.records import write

    for name in args.names:
        if name not in SPOTS:
            raise UnknownName("group", name, SPOTS)
    device, without = _where(args)
    groups = [g for g in SPOTS if (g in args.names if args.names else (args.out / f"{g}.json").is_file())]
    if not groups:
        raise InvalidInput(f"{args.out} holds no bench record; name the folder that does with --out")
    say, failed, told = _say(args), 0, dict[str, Any]()
    runner = Runner(device, without=without, quick=args.quick, say=say)
    for group in groups:
        path = args.out / f"{group}.json"
        record, spots, now = read(path), [], {}
        for name in SPOTS[group]:
            if name not in record["cases"]:
                say(f"{group}: holds no measurement of {name}; measure it (longreach bench run {name})")
                continue
            then = record["cases"][name]
            case = repeated(tiny(CASES[name]) if args.tiny else CASES[name], then)
            try:
                now[name] = runner.run(case, then.get("seed", args.seed))
            except (LongreachError, RuntimeError) as error:  # the other groups may be right
                say(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
                continue
            spots.append(compare(name, then, now[name]))
            for line in spots[-1].lines():
                say(line)
        good = len(spots) == len(SPOTS[group]) and all(spot.confirmed for spot in spots)
        if good:
            stated = conditions(device)
            write(path, confirmed(record, spots, now, stated))
        say(f"{group}: {'confirmed' if good else f'not confirmed; measure it again (longreach bench run {group})'}")
        failed += not good
        told[group] = {"confirmed": good, "lines": [line for spot in spots for line in spot.lines()]}
    if args.json:
        emit(told)
    return 1 if failed else 0


def _readme(args: argparse.Namespace) -> int:
    from longreach.bench.readme import PAGES, redrawn, update

    root = Path()
    changed: dict[str, bool | None] = {page: update(root, page, args.out) for page in PAGES}
    changed |= redrawn(root, args.out)
    if args.json:
        emit({"changed": changed})
    else:
        for page, written in changed.items():
            state = "not drawn: pip install 'longreach[report]'" if written is None else "is up to date"
            print(f"{page} {'written' if written else state}")
    return 0
