"""`python -m longreach` is the command `longreach`."""

from __future__ import annotations

import sys

from longreach.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
