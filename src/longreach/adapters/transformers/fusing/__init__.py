"""Read prompts of which parts are stored chunks: their keys and values are placed, some tokens are recomputed."""

from longreach.adapters.transformers.fusing.one_pass import FusionReport
from longreach.adapters.transformers.fusing.prompt import FusedPrompt, PlacedChunk
from longreach.adapters.transformers.fusing.read import read, read_batch

__all__ = ["FusedPrompt", "FusionReport", "PlacedChunk", "read", "read_batch"]
