"""Hugging Face transformers: attach a method to a model, load a model, the cache that generate uses."""

from longreach.adapters.transformers.attach import Session, attach
from longreach.adapters.transformers.batch_reading import BatchAnswer, BatchReader
from longreach.adapters.transformers.capture import residuals
from longreach.adapters.transformers.checks import cache_windows, shape_of
from longreach.adapters.transformers.chunking import Piece, Pieces, Splitter, split
from longreach.adapters.transformers.fingerprint import Fingerprint, fingerprint
from longreach.adapters.transformers.hf_cache import LongreachCache
from longreach.adapters.transformers.load import device_of, load, model_path, shape_at
from longreach.adapters.transformers.loop.settings import unapplied
from longreach.adapters.transformers.obtain import Obtained, obtain
from longreach.adapters.transformers.precompute import Precompute
from longreach.adapters.transformers.reading import (
    CHUNK,
    Advance,
    Answer,
    Reader,
    chat,
    check_length,
    context_limit,
    encode,
    prompts,
    share,
    stop_strings,
    stop_tokens,
)

__all__ = [
    "CHUNK",
    "Advance",
    "Answer",
    "BatchAnswer",
    "BatchReader",
    "Fingerprint",
    "LongreachCache",
    "Obtained",
    "Piece",
    "Pieces",
    "Precompute",
    "Reader",
    "Session",
    "Splitter",
    "attach",
    "cache_windows",
    "chat",
    "check_length",
    "context_limit",
    "device_of",
    "encode",
    "fingerprint",
    "load",
    "model_path",
    "obtain",
    "prompts",
    "residuals",
    "shape_at",
    "shape_of",
    "share",
    "split",
    "stop_strings",
    "stop_tokens",
    "unapplied",
]
