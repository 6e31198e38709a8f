"""Prompts that cannot be made are refused with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import longreach
from longreach.adapters.transformers import load, prompts
from longreach.errors import InvalidInput, ModelFileError
from longreach.testing.tiny import save_tiny, tiny_model


def test_a_chat_template_that_fails(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    _, tokenizer = load(tmp_path)
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(ModelFileError, match=r"chat template failed .*no such role"):
        prompts(tokenizer, "a document", ["a question"])


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    _, tokenizer = load(tmp_path)
    with pytest.raises(InvalidInput, match="not UTF-8"):
        prompts(tokenizer, "a document", ["a\udcffquestion"])


def test_a_prompt_that_ends_with_padding() -> None:
    model = tiny_model("llama")
    ids = torch.randint(3, 60, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    with longreach.attach(model), pytest.raises(InvalidInput, match="pad on the left"):
        model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)


def test_quantised_linear_layers() -> None:
    model = tiny_model("llama")
    quantised = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    quantised.set_attn_implementation("eager")
    ids = torch.randint(3, 60, (1, 20), generator=torch.Generator().manual_seed(3))
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    expected = quantised.generate(ids, **options)
    with longreach.attach(quantised):
        assert torch.equal(quantised.generate(ids, **options), expected)
