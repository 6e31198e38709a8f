"""Ways to count tokens, from coarse to fine, one of them a real byte-pair tokenizer."""

from __future__ import annotations

from importlib.resources import files
from random import Random

from tokenizers import Tokenizer

from longreach.tasks.base import Count, Sample, Task
from longreach.testing.tiny import tiny_tokenizer

_mini = Tokenizer.from_str((files("longreach") / "models/longreach-mini/tokenizer.json").read_text(encoding="utf-8"))
_tiny = tiny_tokenizer()


def words(text: str) -> int:
    return len(text.split())


COUNTS: dict[str, Count] = {
    "words": words,
    "thirds": lambda text: -(-len(text) // 3),
    "bytes": lambda text: len(_tiny(text, add_special_tokens=False).input_ids),
    "mini": lambda text: len(_mini.encode(text, add_special_tokens=False).ids),
}


def whole(sample: Sample) -> str:
    """What a model without a chat template reads."""
    return f"{sample.context}{sample.joint}{sample.question} {sample.begun}"


def made(task: Task, room: int = 3000, seed: int = 0, count: Count = words) -> Sample:
    return task.sample(Random(seed), room, count)
