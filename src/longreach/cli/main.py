"""`longreach VERB ...`: finds the verb, runs it, and turns errors into one line with the remedy."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from importlib import import_module
from typing import Any, NoReturn

from longreach import __version__
from longreach.cli.common import FAILED, add_command
from longreach.errors import LongreachError, MeasurementFailed

VERBS = ("demo", "run", "check", "compare", "eval", "perplexity", "dialogue", "generation", "attention", "fusion",
         "sampling", "report",
         "store", "calibrate", "plan", "methods", "mka", "bench", "env", "train")  # fmt: skip

CODES = (
    "exit codes: 0: done; 1: `bench check`, `store verify` or `plan verify` found faults; 2: wrong usage or input;\n"
    "3: a part of the measurement failed (the record counts it, and the same command measures that part again);\n"
    "130: interrupted"
)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all others. `args.parser` is the parser of the verb."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    parser = Parser(
        prog="longreach", description="Long contexts at a fraction of the attention reads.", allow_abbrev=False,
        epilog=CODES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"longreach {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name in VERBS:
        module: Any = import_module(f"longreach.cli.{name}")
        verb = add_command(verbs, name, module.HELP, module.EXAMPLES)
        module.add_arguments(verb)
        verb.set_defaults(run=module.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code, one of CODES."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # an answer may hold what the terminal cannot show
    if "torch" not in sys.modules:  # threads that spin while they wait make a busy machine several times slower
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(args, "names") or any(word.startswith("-") for word in rest)):
        args.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # argparse takes names before the options only
        args.names = [*args.names, *rest]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            code = int(args.run(args))
        sys.stdout.flush()
        return code
    except LongreachError as error:
        print(f"longreach: {_one_line(error)}{_notes(error)}", file=sys.stderr)
        return FAILED if isinstance(error, MeasurementFailed) else 2
    except BrokenPipeError:  # the reader of our output has left; so that nothing is flushed into the pipe at exit:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt as error:
        print(f"longreach: interrupted{_notes(error)}", file=sys.stderr)
        return 130


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


def _notes(error: BaseException) -> str:
    """What those on its way had to add."""
    return "".join(f"; {_one_line(note)}" for note in getattr(error, "__notes__", ()))


def _warn(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    print(f"longreach: warning: {_one_line(message)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
