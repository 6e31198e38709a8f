"""The harness loads task data through the package datasets, which asks no network here."""

from __future__ import annotations

import os

os.environ.setdefault("HF_DATASETS_OFFLINE", "1")  # read by datasets when loaded
