"""longreach: long contexts at a fraction of the attention reads.

Importing this package loads nothing heavy and changes nothing; names are resolved on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_NAMES = {
    "attach": "longreach.adapters.transformers",
    "Session": "longreach.adapters.transformers",
    "detach": "longreach.adapters.transformers",
    "load": "longreach.adapters.transformers",
    "convert": "longreach.adapters.transformers.mka",
    "generate": "longreach.adapters.transformers.loop",
    "Chat": "longreach.adapters.transformers.conversation",
    "LongreachCache": "longreach.adapters.transformers",
    "Documents": "longreach.adapters.transformers",
    "compare": "longreach.evals.on_text",
    "evaluate": "longreach.evals.measured",
    "perplexity": "longreach.evals.on_text",
    "calibrate": "longreach.evals.calibration.run",
    "ChunkPool": "longreach.store",
    "ChunkStore": "longreach.store",
    "CacheConfig": "longreach.cache",
    "Dense": "longreach.methods.dense",
    "StreamingLLM": "longreach.methods.streaming_llm",
    "OracleTopK": "longreach.methods.oracle_top_k",
    "OracleSampling": "longreach.methods.oracle_sampling",
    "Quest": "longreach.methods.quest",
    "OmniKV": "longreach.methods.omnikv",
    "LessIsMore": "longreach.methods.less_is_more",
    "Loki": "longreach.methods.loki",
    "Kascade": "longreach.methods.kascade",
    "MAC": "longreach.methods.mac",
    "MagicPIG": "longreach.methods.magicpig",
    "BlockMKA": "longreach.methods.block_mka",
    "FullReuse": "longreach.methods.fusion",
    "PIE": "longreach.methods.fusion",
    "LegoLink": "longreach.methods.fusion",
    "CacheBlend": "longreach.methods.fusion",
    "A3": "longreach.methods.fusion",
    "A3Deep": "longreach.methods.fusion",
    "Dependence": "longreach.methods.fusion",
    "SnapKV": "longreach.methods.snapkv",
    "LongreachError": "longreach.errors",
}
# packages with names of their own for users, as in longreach.mka.register
_ROOMS = {"mka": "longreach.mka", "vllm": "longreach.adapters.vllm"}
__all__ = ["__version__", *_NAMES, *_ROOMS]

if TYPE_CHECKING:
    from longreach.adapters.transformers import Documents as Documents
    from longreach.adapters.transformers import LongreachCache as LongreachCache
    from longreach.adapters.transformers import Session as Session
    from longreach.adapters.transformers import attach as attach
    from longreach.adapters.transformers import detach as detach
    from longreach.adapters.transformers import load as load
    from longreach.adapters.transformers.conversation import Chat as Chat
    from longreach.adapters.transformers.loop import generate as generate
    from longreach.adapters.transformers.mka import convert as convert
    from longreach.cache import CacheConfig as CacheConfig
    from longreach.errors import LongreachError as LongreachError
    from longreach.evals.calibration.run import calibrate as calibrate
    from longreach.evals.measured import evaluate as evaluate
    from longreach.evals.on_text import compare as compare
    from longreach.evals.on_text import perplexity as perplexity
    from longreach.methods.block_mka import BlockMKA as BlockMKA
    from longreach.methods.dense import Dense as Dense
    from longreach.methods.fusion import A3 as A3
    from longreach.methods.fusion import PIE as PIE
    from longreach.methods.fusion import A3Deep as A3Deep
    from longreach.methods.fusion import CacheBlend as CacheBlend
    from longreach.methods.fusion import Dependence as Dependence
    from longreach.methods.fusion import FullReuse as FullReuse
    from longreach.methods.fusion import LegoLink as LegoLink
    from longreach.methods.kascade import Kascade as Kascade
    from longreach.methods.less_is_more import LessIsMore as LessIsMore
    from longreach.methods.loki import Loki as Loki
    from longreach.methods.mac import MAC as MAC
    from longreach.methods.magicpig import MagicPIG as MagicPIG
    from longreach.methods.omnikv import OmniKV as OmniKV
    from longreach.methods.oracle_sampling import OracleSampling as OracleSampling
    from longreach.methods.oracle_top_k import OracleTopK as OracleTopK
    from longreach.methods.quest import Quest as Quest
    from longreach.methods.snapkv import SnapKV as SnapKV
    from longreach.methods.streaming_llm import StreamingLLM as StreamingLLM
    from longreach.store import ChunkPool as ChunkPool
    from longreach.store import ChunkStore as ChunkStore


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(_ROOMS[name])
    if name not in _NAMES:
        raise AttributeError(f"module 'longreach' has no attribute {name!r}; it has: {', '.join(__all__)}")
    return getattr(import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
