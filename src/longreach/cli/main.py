"""`longreach VERB ...`: finds the verb, runs it, and turns errors into one line with the remedy."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import Any

from longreach import __version__
from longreach.errors import LongreachError

VERBS = ("demo", "run", "compare", "methods", "env", "train")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    parser = argparse.ArgumentParser(
        prog="longreach", description="Long contexts at a fraction of the attention reads.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"longreach {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name in VERBS:
        module: Any = import_module(f"longreach.cli.{name}")
        verb = verbs.add_parser(
            name, help=module.HELP, description=module.HELP[0].upper() + module.HELP[1:] + ".", allow_abbrev=False,
            epilog="examples:\n" + "\n".join(f"  {line}" for line in module.EXAMPLES),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        module.add_arguments(verb)
        verb.set_defaults(run=module.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 2 for errors of use or input, 130 when interrupted."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except LongreachError as error:
        print(f"longreach: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        print("longreach: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
