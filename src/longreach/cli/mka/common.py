"""Arguments and steps that the commands of `longreach mka` share."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longreach.cli.common import add_device, count, positive
from longreach.cli.show import percent, progress
from longreach.errors import InvalidInput

if TYPE_CHECKING:
    import torch

    from longreach.evals.calibration.prompts import Prompts

TASKS = "niah_single_2,niah_multikey_1,vt,fwe"  # prompts to measure on, where no text is given
LENGTH = 2048


def add_folders(parser: argparse.ArgumentParser, what: str) -> None:
    """MODEL, --out and --device. what: the kind of model."""
    parser.add_argument("model", metavar="MODEL", help=f"{what}: a model directory, or 'mini', the one shipped")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR",
                        help="folder for the model, new or empty")  # fmt: skip
    add_device(parser)


def add_prompts(parser: argparse.ArgumentParser, use: str, prompts: int) -> None:
    """--text, --tasks, --length, --prompts, --seed. use: what prompts are for."""
    parser.add_argument("--text", type=Path, action="append", default=[], metavar="FILE",
                        help=f"UTF-8 text, whose windows are {use}; may be given several times")  # fmt: skip
    parser.add_argument("--tasks", metavar="A,B", help=f"prompts of these tasks with their answers are {use}, named as "
                        f"for `longreach eval` (default without --text: {TASKS})")  # fmt: skip
    parser.add_argument("--length", type=positive, metavar="N",
                        help=f"tokens of a prompt (default {LENGTH}, or the model's context)")  # fmt: skip
    parser.add_argument("--prompts", type=positive, default=prompts, metavar="N",
                        help=f"windows of the texts, and prompts of each task (default {prompts})")  # fmt: skip
    parser.add_argument("--seed", type=count, default=1, metavar="N",
                        help="of prompts (default 1; evaluations use 0)")  # fmt: skip


def prompts_of(args: argparse.Namespace, model: Any, tokenizer: Any, least: int = 2) -> Prompts:
    """The prompts that the arguments of `add_prompts` describe. least: tokens that each must have."""
    from longreach.adapters.transformers import context_limit
    from longreach.evals.calibration.prompts import make
    from longreach.evals.prompting import fitted
    from longreach.tasks import registry

    length = args.length or min(LENGTH, context_limit(model) or LENGTH)
    tasks = registry.choose(args.tasks) if args.tasks is not None else []
    for task in [] if tasks or args.text else registry.choose(TASKS):
        with suppress(InvalidInput):  # of the default tasks, those that fit
            fitted(task, tokenizer, length, args.seed, 0, args.prompts)
            tasks.append(task)
    if not tasks and not args.text:
        raise InvalidInput(f"none of the tasks {TASKS} fits {length} tokens; raise --length, or give --text FILE")
    with progress("making prompts", args.prompts * (len(tasks) + bool(args.text))) as advance:
        return make(model, tokenizer, args.text, tasks, length=length, count=args.prompts, least=least, seed=args.seed,
                    made=advance)  # fmt: skip


def stored_dtype(model: str) -> torch.dtype:
    """The dtype of a model directory's weights, in which a model made of it is written."""
    import torch

    from longreach.adapters.transformers import model_path

    config = json.loads((model_path(model) / "config.json").read_text(encoding="utf-8"))
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    found = getattr(torch, str(name), None)
    return found if isinstance(found, torch.dtype) and found.is_floating_point else torch.float32


def conversion_of(model: str) -> dict[str, Any] | None:
    """How a model directory was converted; None if it was not, or by other means than `longreach mka convert`."""
    from longreach.adapters.transformers import model_path
    from longreach.train.mka.checkpoint import CONVERSION

    path = model_path(model) / CONVERSION
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except ValueError as error:
        raise InvalidInput(f"{path} is no JSON ({error}); convert the original again") from error
    return found if isinstance(found, dict) else None


def write_conversion(model: str, folder: Path) -> None:
    """Take the record of a conversion along into a folder made of the model, if there is one."""
    from longreach.adapters.transformers import model_path
    from longreach.train.mka.checkpoint import CONVERSION

    path = model_path(model) / CONVERSION
    if path.is_file():
        shutil.copyfile(path, folder / CONVERSION)


def layer_numbers(text: str) -> tuple[int, ...]:
    """An argument such as 0,1,2."""
    return tuple(whole_numbers(text, 0))


def whole_numbers(text: str, least: int) -> list[int]:
    """Whole numbers between commas. Raises ArgumentTypeError."""
    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found or min(found) < least:
        raise argparse.ArgumentTypeError(f"expected whole numbers of at least {least} between commas, got {text!r}")
    return found


def distance_line(found: dict[str, Any]) -> str:
    """A distance from the original in a sentence."""
    text = f"KL {found['kl']:.3g} nats a token, same first choice for {percent(found['agreement'])} of tokens"
    if found["answer_agreement"] is not None:
        text += f" ({percent(found['answer_agreement'])} of answers')"
    return f"{text}, perplexity {found['perplexity']:.4g} (original {found['original_perplexity']:.4g})"


def names_of(layers: Sequence[int]) -> str:
    """Layers in words: "all", or their numbers."""
    return ", ".join(map(str, layers)) if layers else "all"
