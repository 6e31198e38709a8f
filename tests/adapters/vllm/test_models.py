"""Other models than longreach-mini: sliding windows, soft caps, and heads that CPU_ATTN has no kernel for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import longreach
from longreach.testing.tiny import random_tokens, save_tiny
from tests.adapters.vllm.engines import answers, engine

pytestmark = pytest.mark.vllm
QUEST = "quest k=0.1 page=16 dense_layers=[]"


@pytest.mark.parametrize(
    ("family", "dim"),
    [("gemma2", 64), ("mistral", 32), ("llama", 16), ("qwen3", 64)],
)
def test_answers_of_other_models(tmp_path: Path, family: str, dim: int) -> None:
    """Layers with a sliding window attend to it exactly."""
    save_tiny(tmp_path, family, head_dim=dim, tie_word_embeddings=family == "gemma2")  # as the real one
    ids = [random_tokens(1, n, seed=n)[0].tolist() for n in (300, 70, 9)]
    model, _ = longreach.load(str(tmp_path), dtype=torch.float32)
    made = [longreach.generate(model, torch.tensor([each]), max_new_tokens=12, decode=QUEST, eos_token_id=())
            for each in ids]  # fmt: skip
    with engine(QUEST, model=str(tmp_path), max_model_len=512) as llm:
        found = answers(llm, ids, 12)
        report = longreach.vllm.report(llm)
    assert found == [one.tokens[0].tolist() for one in made]
    decode = [layer for layer in report.layers if layer.phase == "decode"]
    prompts = [layer for layer in report.layers if layer.phase == "prefill"]
    windows = {"gemma2": [True, False], "mistral": [True, True]}.get(family, [False, False])
    assert [layer.dense_reasons == ("sliding window of 16",) for layer in decode] == windows
    assert [layer.method for layer in decode] == ["dense" if window else "quest" for window in windows]
    assert all(("CPU_ATTN" in layer.impl) == (dim != 16) for layer in prompts)
