"""`longreach train mini --evaluate`: one needle in real text, and the same prompts without it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from longreach.adapters.transformers import load, model_path
from longreach.errors import ModelFileError
from longreach.records import environment, wilson
from longreach.tasks import haystack
from longreach.tasks.needle import KeySource, evaluation_episode
from longreach.train.mini.checkpoint import CORPUS

ANSWER_ROOM = 16


@dataclass(frozen=True)
class Sample:
    """One prompt and what the model made of it."""

    depth: float
    tokens: int
    characters: int
    expected: str
    answer: str
    right: bool
    control_answer: str
    control_right: bool


def training_overlap(folder: Path) -> dict[str, int] | None:
    """Stretches of so many characters that a model's training text shares with the haystack, as counted when the
    text was made; None where the model does not say what it was trained on, or was held against another haystack.
    """
    path = folder / CORPUS
    try:
        corpus = json.loads(path.read_text()) if path.is_file() else {}
        if corpus.get("haystack_sha256") != haystack.sha256():
            return None
        return {"characters": corpus["overlap_window"], "stretches": corpus["overlap_hits"]}
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelFileError(f"{path} is not as training writes it ({error!r}); mend it or remove it") from error


def evaluate(
    model: str, *, samples: int = 200, length: int = 4096, seed: int = 0, device: str = "cpu",
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:  # fmt: skip
    """Ask `samples` single-needle questions at `length` tokens (prompt and answer), dense attention, greedy.

    Depths are uniform; keys come from words kept from training, values are 7 fresh digits. An answer is right iff
    it contains the value. The control is the same text without the needle.
    """
    network, tokenizer = load(model, device=device)
    generate: Any = network.generate
    source, results = KeySource(True), list[Sample]()
    for number in range(samples):
        random = Random(f"evaluate/{seed}/{number}")
        episode, depth = evaluation_episode(random, source), (number + random.random()) / samples
        needle, spot = episode.needles[0], random.randrange(1 << 30)

        def prompt(facts: list[tuple[float, str]], episode: Any = episode, spot: int = spot) -> str:
            def count(text: str) -> int:
                return len(tokenizer(text).input_ids)

            room = length - ANSWER_ROOM - count("\n\n" + episode.needles[0].question)
            text = haystack.document(Random(spot), facts, room, count, episode.intro)
            return f"{text}\n\n{episode.needles[0].question}"

        def answered(text: str) -> tuple[str, int]:
            ids = torch.tensor([tokenizer(text).input_ids], device=network.device)
            out = generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER_ROOM, do_sample=False)
            return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True), ids.shape[1]

        text = prompt([(depth, needle.statement)])
        said, tokens = answered(text)
        control, _ = answered(prompt([]))
        right = needle.value in said
        results.append(Sample(depth, tokens, len(text), needle.value, said, right, control, needle.value in control))
        progress(1)
    total = sum(s.right for s in results)
    folder = model_path(model)
    weights = (folder / "model.safetensors").read_bytes()
    return {
        "what": "single needle in real text",
        "config": {
            "samples": samples,
            "length": length,
            "seed": seed,
            "model": Path(model).name,
            "decoding": "greedy",
            "attention": "dense",
        },
        "model_sha256": hashlib.sha256(weights).hexdigest(),
        "haystack_sha256": haystack.sha256(),
        "training_overlap": training_overlap(folder),
        **environment(network.device),
        "dtype": str(network.dtype).removeprefix("torch."),
        "right": total,
        "accuracy": total / samples,
        "interval_95": wilson(total, samples),
        "control_right": sum(s.control_right for s in results),
        "characters_per_token": sum(s.characters for s in results) / sum(s.tokens for s in results),
        "samples": [asdict(s) for s in results],
    }
