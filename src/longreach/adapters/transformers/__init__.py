"""Hugging Face transformers: attach a method to a model, load a model, the cache that generate uses."""

from longreach.adapters.transformers.answer_text import pieces
from longreach.adapters.transformers.attach import Session, attach, check_host, detach
from longreach.adapters.transformers.automatic_plans import planned_shape
from longreach.adapters.transformers.checks import cache_windows, shape_of
from longreach.adapters.transformers.chunking import Piece, Pieces, Splitter, split
from longreach.adapters.transformers.dependence import DependenceMeter
from longreach.adapters.transformers.documents import Account, ChunkOrigin, Documents
from longreach.adapters.transformers.fingerprint import Fingerprint, fingerprint
from longreach.adapters.transformers.fusing import FusedPrompt, FusionReport
from longreach.adapters.transformers.fusing import read as read_fused
from longreach.adapters.transformers.get_or_compute import ChunkResult, get_or_compute
from longreach.adapters.transformers.hf_cache import LongreachCache
from longreach.adapters.transformers.inspect_model import ModelFit, check_method, inspect_model, unfit_methods
from longreach.adapters.transformers.load import device_of, load, model_path, shape_at
from longreach.adapters.transformers.loop.settings import unapplied
from longreach.adapters.transformers.placement import BETWEEN, ChunkPlace, places
from longreach.adapters.transformers.precompute import Precompute
from longreach.adapters.transformers.prompt_reader import CHUNK, Advance, Answer, BatchAnswer, BatchReader, Reader
from longreach.adapters.transformers.prompt_tokens import (
    chat,
    check_length,
    context_limit,
    document_head,
    encode,
    frame,
    prompts,
    share,
    stop_strings,
    stop_tokens,
)
from longreach.adapters.transformers.residual_hooks import residuals
from longreach.adapters.transformers.save import save

__all__ = [
    "BETWEEN",
    "CHUNK",
    "Account",
    "Advance",
    "Answer",
    "BatchAnswer",
    "BatchReader",
    "ChunkOrigin",
    "ChunkPlace",
    "ChunkResult",
    "DependenceMeter",
    "Documents",
    "Fingerprint",
    "FusedPrompt",
    "FusionReport",
    "LongreachCache",
    "ModelFit",
    "Piece",
    "Pieces",
    "Precompute",
    "Reader",
    "Session",
    "Splitter",
    "attach",
    "cache_windows",
    "chat",
    "check_host",
    "check_length",
    "check_method",
    "context_limit",
    "detach",
    "device_of",
    "document_head",
    "encode",
    "fingerprint",
    "frame",
    "get_or_compute",
    "inspect_model",
    "load",
    "model_path",
    "pieces",
    "places",
    "planned_shape",
    "prompts",
    "read_fused",
    "residuals",
    "save",
    "shape_at",
    "shape_of",
    "share",
    "split",
    "stop_strings",
    "stop_tokens",
    "unapplied",
    "unfit_methods",
]
