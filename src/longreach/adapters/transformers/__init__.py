"""Hugging Face transformers: attach a method to a model, load a model, the cache that generate uses."""

from longreach.adapters.transformers.attach import Session, attach
from longreach.adapters.transformers.hf_cache import LongreachCache
from longreach.adapters.transformers.load import load

__all__ = ["LongreachCache", "Session", "attach", "load"]
