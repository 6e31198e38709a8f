"""`longreach calibrate a3_deep`: the layer in which a question's attention chooses the tokens to recompute."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from longreach.cli.calibrate.common import add_prompts
from longreach.cli.common import positive
from longreach.errors import InvalidInput

if TYPE_CHECKING:
    from longreach.evals.calibration.base import Calibration

HELP = "find the layer in which a question chooses the best tokens to recompute"
EXAMPLES = (
    "longreach calibrate a3_deep --model mini --output deep.json",
    "longreach calibrate a3_deep --model ./Llama-3.1-8B-Instruct --tasks vt,qa_synthetic_1 --length 16384 \\",
    "    --layers 4,8,12,16 --output deep.json",
)
TASKS = "vt,qa_synthetic_1,qa_synthetic_2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompts(parser, tasks=TASKS)
    parser.add_argument("--ratio", type=float, default=0.15, metavar="R", help="share of a prompt's tokens that is "
                        "recomputed (default 0.15)")  # fmt: skip
    parser.add_argument("--layers", metavar="A,B", help="layers to try (default: all); each takes a fused read a "
                        "prompt")  # fmt: skip
    parser.add_argument("--chunk-tokens", type=positive, default=512, metavar="N", help="tokens of a chunk at most "
                        "(default 512)")  # fmt: skip


def options(args: argparse.Namespace) -> Calibration:
    from longreach.evals.calibration.run import calibration

    return calibration("a3_deep", ratio=args.ratio, layers=_layers(args.layers), chunk_tokens=args.chunk_tokens)


def _layers(text: str | None) -> tuple[int, ...] | None:
    """The layers that --layers names, None for all. Raises InvalidInput for text that names none."""
    if text is None:
        return None
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise InvalidInput(f"--layers {text}: expected layer numbers, such as 4,8") from error
