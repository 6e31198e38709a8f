"""What is asked of the harness's model: methods as text, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longreach.adapters import lm_eval as adapter
from longreach.adapters.lm_eval.options import batch_of, dtype_of
from longreach.cache import CacheConfig
from longreach.errors import InvalidInput, ModelFileError, UnknownName, Unsupported
from tests.adapters.lm_eval.requests import ours

pytest.importorskip("lm_eval")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"parallelize": True}, "parallelize=True is not supported: .* one device"),
        ({"tp_plan": "auto"}, "tp_plan='auto'"),
        ({"peft": "x"}, "peft='x' is not supported: merge the adapter"),
        ({"delta": "x"}, "delta"),
        ({"gptqmodel": True}, "gptqmodel"),
        ({"autogptq": True}, "autogptq"),
        ({"gguf_file": "x.gguf"}, "gguf_file"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"revision": "v2"}, "revision"),
        ({"softmax_dtype": "float16"}, "softmax_dtype"),
        ({"max_batch_size": 8}, "max_batch_size=8 .* give batch_size a number"),
        ({"backend": "seq2seq"}, "backend: .* decoder-only"),
        ({"batch_size": "auto"}, "batch_size='auto'"),
        ({"batch_size": "auto:4"}, "batch_size='auto:4'"),
    ],
)
def test_what_the_harness_can_and_longreach_cannot_is_refused_by_name(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(Unsupported, match=complaint):
        ours(**options)


@pytest.mark.parametrize(
    ("options", "error", "complaint"),
    [
        (
            {"logits_cache": True},
            UnknownName,
            "unknown option of the longreach model 'logits_cache'; known: pretrained",
        ),
        ({"scoring": "both"}, UnknownName, "unknown scoring 'both'; known: prefill, decode"),
        ({"cache": "ring"}, InvalidInput, "kind: expected 'contiguous' or 'paged'"),
        ({"impl": "fast"}, UnknownName, "'fast'"),
        ({"batch_size": 0}, InvalidInput, "batch_size: expected a count"),
        ({"batch_size": True}, InvalidInput, "batch_size: expected a count"),
        ({"prefill_chunk_size": 0}, InvalidInput, "prefill_chunk_size: expected a count"),
        ({"prefill": "oracle_top_k"}, UnknownName, "unknown prefill method 'oracle_top_k'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], error: type[Exception], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        ours(**options)


def test_options_that_ask_for_nothing_are_let_through() -> None:
    with ours(parallelize=False, peft=None, backend="causal", batch_size="2", cache="paged") as lm:
        assert lm.batch_size == 2 and lm.session.cache_config == CacheConfig("paged")


def test_one_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Unsupported, match="2 processes"):
        ours()
    monkeypatch.setenv("WORLD_SIZE", "1")
    ours().close()


def test_a_directory_without_a_model_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ModelFileError, match="no model directory"):
        adapter.LongreachLM(str(tmp_path / "none"))


def test_small_options() -> None:
    assert dtype_of("auto") is None and dtype_of("bfloat16") is dtype_of(torch.bfloat16) is torch.bfloat16
    with pytest.raises(InvalidInput, match="dtype: expected one such as 'bfloat16'"):
        dtype_of("float99")
    assert batch_of("3") == batch_of(3) == 3


def test_without_the_harness_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "longreach.adapters.lm_eval.model", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval.api.registry", None)
    with pytest.raises(Unsupported, match=r"cannot be loaded .*pip install 'longreach\[lm-eval\]'"):
        _ = adapter.LongreachLM
    with pytest.raises(AttributeError, match="has no attribute 'Longreach'"):
        _ = adapter.Longreach
