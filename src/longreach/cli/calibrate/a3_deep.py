"""`longreach calibrate a3_deep`: the layer in which a question's attention chooses the tokens to recompute."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from longreach.cli.calibrate.common import Work, add_prompts
from longreach.cli.common import positive
from longreach.errors import InvalidInput

if TYPE_CHECKING:
    from longreach.methods.call import ModelShape

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


def run(args: argparse.Namespace) -> int:
    if not 0 < args.ratio < 1:
        raise InvalidInput(f"--ratio: expected a number above 0 and below 1, got {args.ratio}")

    def fits(shape: ModelShape) -> None:
        layers_of(args.layers, shape.layers)

    settings = {"ratio": args.ratio, "layers": args.layers or "all", "chunk_tokens": args.chunk_tokens}
    work = Work(args, settings, fits=fits, chunk_tokens=args.chunk_tokens)
    from longreach.evals.calibration.a3_deep import measure
    from longreach.methods.fusion.plan import A3DeepPlan

    layers = layers_of(args.layers, work.shape.layers)
    parts = work.measure(partial(measure, work.model, work.tokenizer, work.prompts.prompts, layers, args.ratio))
    return work.show_plan(work.save(A3DeepPlan.of_parts(parts, layers, args.ratio).values(), {}))


def layers_of(text: str | None, count: int) -> list[int]:
    """The layers that --layers names of a model's `count`, ascending. Raises InvalidInput for others."""
    if text is None:
        return list(range(count))
    try:
        layers = sorted({int(word) for word in text.split(",")})
    except ValueError as error:
        raise InvalidInput(f"--layers {text}: expected layer numbers, such as 4,8") from error
    if not 0 <= layers[0] <= layers[-1] < count:
        raise InvalidInput(f"--layers {text}: expected layers of the model, 0 to {count - 1}")
    return layers
