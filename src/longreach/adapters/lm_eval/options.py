"""Options of the harness's user: methods as text, and options of its transformers model that do not apply."""

from __future__ import annotations

import os
from typing import Any

import torch

from longreach.errors import InvalidInput, UnknownName, Unsupported

PASSED_ON = (  # HFLM's options with the same meaning here
    "add_bos_token",
    "chat_template_args",
    "enable_thinking",
    "max_length",
    "prefix_token_id",
    "think_end_token",
    "truncation",
)
ONE_DEVICE = "longreach attaches to a model on one device"
LOCAL = "models are loaded from local directories of safetensors"
FLOAT32 = "scores are computed in float32 from the model's logits"
REFUSED = {  # option of HFLM -> why
    "parallelize": ONE_DEVICE,
    "max_memory_per_gpu": ONE_DEVICE,
    "max_cpu_memory": ONE_DEVICE,
    "tp_plan": ONE_DEVICE,
    "revision": LOCAL,
    "subfolder": LOCAL,
    "trust_remote_code": LOCAL,
    "gguf_file": LOCAL,
    "autogptq": LOCAL,
    "gptqmodel": LOCAL,
    "delta": "merge the weights first, and give the model",
    "peft": "merge the adapter into the model first, and give the model",
    "mixed_precision_dtype": FLOAT32,
    "softmax_dtype": FLOAT32,
    "max_batch_size": "give batch_size a number",
}


def check_options(options: dict[str, Any]) -> None:
    """Raise Unsupported for options that are not supported, UnknownName for unknown ones."""
    if options.pop("backend", "default") not in ("default", "causal"):
        raise Unsupported("backend: longreach attaches to decoder-only models; leave it out")
    for name in [n for n in options if n in REFUSED]:
        value = options.pop(name)
        if value:
            raise Unsupported(f"{name}={value!r} is not supported: {REFUSED[name]}")
    for name in options:
        if name not in PASSED_ON:
            raise UnknownName("option of the longreach model", name, (*OWN, *PASSED_ON))


OWN = ("pretrained", "tokenizer", "prefill", "decode", "scoring", "cache", "impl", "prefill_chunk_size", "device",
       "dtype", "batch_size")  # fmt: skip


def check_processes() -> None:
    """Raise Unsupported in one of several processes of `accelerate launch` or torchrun."""
    processes = int(os.environ.get("WORLD_SIZE") or 1)
    if processes > 1:
        raise Unsupported(
            f"{processes} processes (accelerate launch, torchrun): longreach evaluates in one process on one device; "
            f"start it with python"
        )


def batch_of(size: int | str) -> int:
    """A number of prompts at a time."""
    if str(size).startswith("auto"):
        raise Unsupported(f"batch_size={size!r}: no batch size is searched for; give a number")
    if isinstance(size, bool) or not str(size).isdigit() or not int(size):
        raise InvalidInput(f"batch_size: expected a count >= 1, got {size!r}")
    return int(size)


def dtype_of(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A torch dtype by name; None, as "auto", for float32 on the CPU and the checkpoint's own elsewhere."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return None
    found = getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype):
        raise InvalidInput(f"dtype: expected one such as 'bfloat16' or 'auto', got {dtype!r}")
    return found
