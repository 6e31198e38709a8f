"""lm-evaluation-harness's command, with the model "longreach" among its own."""

from __future__ import annotations

import sys
from importlib import import_module

from longreach.errors import LongreachError


def main() -> int:
    """Run `lm-eval` with this process's arguments; wrong ones end it with a one-line error and exit code 2."""
    try:
        from longreach.adapters.lm_eval import LongreachLM  # noqa: F401 - importing it registers it

        import_module("lm_eval.__main__").cli_evaluate()
    except LongreachError as error:
        print(f"longreach: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
