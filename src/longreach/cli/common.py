"""What several verbs share: model and method arguments, progress on stderr, JSON on stdout."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longreach.errors import InvalidInput, UnknownName

SLOTS = ("prefill", "decode")


def add_model(parser: argparse.ArgumentParser, required: bool) -> None:
    """--model, --device, --dtype."""
    parser.add_argument("--model", required=required, default="mini", metavar="DIR|mini",
                        help="a model directory in transformers' format, or 'mini', the one shipped")  # fmt: skip
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto (default)")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto",
                        help="auto (default): fp32 on the CPU, the checkpoint's own elsewhere")  # fmt: skip


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json."""
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")


def load_model(args: argparse.Namespace) -> tuple[Any, Any]:
    """(model, tokenizer) as the arguments ask for."""
    import torch

    from longreach.adapters.transformers import device_of, load

    dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
    return load(args.model, device=str(device_of(args.device)), dtype=dtype)


def read_document(path: str) -> str:
    """The text of a file, or of standard input for "-". Raises InvalidInput with the remedy."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"{path} is no UTF-8 text (byte {error.start}); convert it, for example with iconv"
        ) from error
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}; check the path given to --document") from error
    if not text.strip():
        raise InvalidInput(f"the document {path} is empty; give one with text in it")
    return text


def parse_settings(settings: list[str]) -> dict[str, dict[str, Any]]:
    """["decode.window=0.3"] -> {"prefill": {}, "decode": {"window": 0.3}}. Raises InvalidInput, UnknownName."""
    options: dict[str, dict[str, Any]] = {slot: {} for slot in SLOTS}
    for setting in settings:
        name, equals, value = setting.partition("=")
        slot, dot, option = name.partition(".")
        if not (equals and dot and option):
            raise InvalidInput(f"--set {setting}: expected SLOT.OPTION=VALUE, for example decode.window=0.3")
        if slot not in options:
            raise UnknownName("slot in --set", slot, SLOTS)
        try:
            options[slot][option] = json.loads(value)
        except ValueError:
            options[slot][option] = value  # a plain word
    return options


def emit(document: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(document, indent=1))


@contextmanager
def progress(what: str, total: int) -> Iterator[Any]:
    """A progress bar on stderr, gone when done; yields advance(n)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda n: bar.advance(task, n)


def milliseconds(seconds: float | None) -> str:
    """A time for a table; "-" where there is none."""
    return "-" if seconds is None else f"{seconds * 1e3:.0f} ms"


def percent(share: float | None) -> str:
    """A share for a table; "-" where there is none."""
    return "-" if share is None else f"{share:.1%}"
