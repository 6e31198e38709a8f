"""Recognise torch's out-of-memory errors, and raise OutOfMemory with the setting to lower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from longreach.errors import OtherRankFailed, OutOfMemory


def out_of_memory(error: BaseException) -> bool:
    """Whether torch ran out of memory, on a GPU or on the CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return not isinstance(error, OutOfMemory)
    if not isinstance(error, RuntimeError) or isinstance(error, OtherRankFailed):  # which quotes another rank's error
        return False
    text = str(error)
    return "can't allocate memory" in text or "not enough memory" in text


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn torch's out-of-memory errors into OutOfMemory."""
    try:
        yield
    except BaseException as error:
        if not out_of_memory(error):
            raise
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise OutOfMemory(
            "memory ran out; the cache holds what it held before. Lower prefill_chunk_size (try 2048), the batch, "
            "max_new_tokens (its memory is allocated at once) or the length of the prompt, or keep keys and values in "
            f"host memory (CacheConfig(host=True)). torch's error: {said}"
        ) from error


def stream_captures() -> bool:
    """Whether a CUDA graph is being captured: then nothing may be sent to the device."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
