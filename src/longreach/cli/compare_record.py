"""The record of `longreach compare`, with and without --documents."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from longreach.cli.common import host_config

if TYPE_CHECKING:
    from longreach.evals.compare import Compare, Comparison


def write_record(
    args: argparse.Namespace, model: Any, task: Compare, found: list[Comparison], where: Any, read: dict[str, Any]
) -> None:
    """Write the record of a comparison to --output. read: the config's entries on documents.

    The config's prefill_chunk_size is null where the prompt was read in one pass by default.
    """
    from longreach.evals.model_info import model_info
    from longreach.evals.plans import to_json
    from longreach.records import write

    config = {"prompt_tokens": len(task.prompt), "steps": args.steps, "layers": args.layers,
              "past_end": args.past_end, "prefill_chunk_size": args.prefill_chunk_size, **read, **host_config(args),
              "question": args.question, "not_applied": task.not_applied}  # fmt: skip
    results = {
        c.label: {
            "kl": c.kl, "kl_steps": list(c.kl_steps), "first_divergence": c.first_divergence, "steps": c.steps,
            "prefill_reads": c.prefill_reads and asdict(c.prefill_reads),
            "decode_reads": c.decode_reads and asdict(c.decode_reads),
            "seconds": {"read": c.read_seconds, "per_token": c.seconds_per_token}, "layer_error": c.layer_error,
            "prefill_layer_error": c.prefill_layer_error, **({"fusion": asdict(c.fusion)} if c.fusion else {}),
            **({"sampling": c.sampling} if c.sampling else {}),
            **({"error_bars": c.error_bars} if c.error_bars else {}),
            **({"plans": to_json(c.plans)} if c.plans else {}),
        }
        for c in found
    }  # fmt: skip
    methods = {spec.label: spec.to_json() for spec in task.specs}
    write(args.output, {"kind": "fidelity", "format": 1, "model": model_info(model, args.model), "config": config,
                        **where, "methods": methods, "results": results})  # fmt: skip
