"""A model whose own attention is another formula than ours is refused, whatever it keeps to itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

from longreach import attach
from longreach.adapters.transformers import check_attention
from longreach.errors import Unsupported
from longreach.testing.tiny import FAMILIES
from tests.adapters.transformers.reference import model_of, prompt

EAGER = modeling_llama.eager_attention_forward


def _temperature(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, **kwargs: Any) -> Any:
    return EAGER(module, q, k, v, mask, scaling * 0.9, **kwargs)


def _cap(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, **kwargs: Any) -> Any:
    k = k.repeat_interleave(2, 1)
    x = 30.0 * torch.tanh(q @ k.transpose(2, 3) * scaling / 30.0) + mask
    return (x.softmax(-1) @ v.repeat_interleave(2, 1)).transpose(1, 2), None


def _gate(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, **kwargs: Any) -> Any:
    return EAGER(module, q, k, v, mask, scaling, **kwargs)[0] * 1.01, None


def _fails(*args: Any, **kwargs: Any) -> Any:
    raise KeyError("alibi")


@pytest.mark.parametrize("own", [_temperature, _cap, _gate])
@torch.no_grad()
def test_a_formula_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch, own: Any) -> None:
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", own)
    with attach(model_of("llama")), pytest.raises(Unsupported, match="LlamaAttention computes attention by a formula"):
        model_of("llama")(prompt())


@torch.no_grad()
def test_sinks_that_stay_in_the_module_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if GPT-OSS did not pass its sinks as a keyword."""
    original = check_attention.check_attention

    def without(module: Any, query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> None:
        original(module, query, key, {n: x for n, x in kwargs.items() if n != "s_aux"})

    monkeypatch.setattr("longreach.adapters.transformers.attention.check_attention", without)
    with (
        attach(model_of("gpt_oss")),
        pytest.raises(Unsupported, match="GptOssAttention computes attention by a formula"),
    ):
        model_of("gpt_oss")(prompt())


@torch.no_grad()
def test_a_formula_that_cannot_be_asked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", _fails)
    with (
        attach(model_of("llama")),
        pytest.raises(Unsupported, match="failed when longreach checked its formula: 'alibi'"),
    ):
        model_of("llama")(prompt())
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", None)
    with attach(model_of("llama")), pytest.raises(Unsupported, match="its formula is unknown"):
        model_of("llama")(prompt())


@torch.no_grad()
def test_every_layer_is_asked_once_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counting(module: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(module.layer_idx)
        return original(module, *args, **kwargs)

    original = modeling_gpt_oss.eager_attention_forward
    monkeypatch.setattr(modeling_gpt_oss, "eager_attention_forward", counting)
    model = model_of("gpt_oss")
    with attach(model):
        model(prompt())
        model(prompt())
    assert asked == [0, 1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_low_precision_is_no_other_formula(family: str, dtype: torch.dtype) -> None:
    """Sinks and norms in few digits stay within the tolerance."""
    model = copy.deepcopy(model_of(family)).to(dtype)
    model.set_experts_implementation("eager")
    with attach(model) as session:
        model(prompt())
        assert session.facts.checked == {0, 1}
