"""What is refused, by name: options of longreach, engines, and layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longreach.errors import InvalidInput, LongreachError, UnknownName, Unsupported
from longreach.testing.tiny import save_tiny
from tests.adapters.vllm.engines import MINI, engine

pytestmark = pytest.mark.vllm


def configure(given: Any, **options: Any) -> Any:
    """The configuration of an engine; no weights are loaded."""
    from vllm.engine.arg_utils import EngineArgs

    more = {"model": str(MINI), "dtype": "float32", "block_size": 32, "enforce_eager": True, **options}
    return EngineArgs(additional_config={"longreach": given}, **more).create_engine_config()


def model(folder: Path, **fields: Any) -> str:
    """A model's folder with a configuration alone."""
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"decode": "kaskade"}, UnknownName, r"unknown decode method 'kaskade'; known: dense, streaming_llm"),
        ({"decode": "quest blocks=3"}, UnknownName, r"unknown option of quest 'blocks'; known: k, page, dense_layers"),
        ({"decode": "quest k=2.0"}, InvalidInput, r"k: expected a count \(int >= 1\) or a fraction"),
        ({"decode": "dense", "prefill": "dense"}, UnknownName, r"unknown key of .*longreach 'prefill'; known: decode"),
        ({}, InvalidInput, r"expected the text of a method, as in \{\"longreach\""),
        ({"decode": 3}, InvalidInput, r"expected the text of a method, .* got \{'decode': 3\}"),
        ("kascade", InvalidInput, r"longreach: expected an object such as"),
        ({"decode": "oracle_top_k"}, Unsupported, r"decode=oracle_top_k: it does not run in vLLM; use one of dense, "),
        ({"decode": "magicpig"}, Unsupported, r"decode=magicpig: it does not run in vLLM"),
        ({"decode": "mac"}, Unsupported, r"decode=mac: it keeps state of each sequence, and vLLM's model runner V1"),
        ({"decode": "quest dense_layers=[12]"}, InvalidInput, r"dense_layers: expected layers of the model, which has"),
        ({"decode": "kascade plan=none.json"}, InvalidInput, r"no plan 'none.json': neither a file nor one of the"),
        ({"decode": "kascade plan=auto"}, InvalidInput, r"plan=auto: plans for kascade and loki are made of a prompt"),
        (
            {"decode": "quest page=48"},
            Unsupported,
            r"blocks of 48 keys, .* In vLLM --block-size sets",
        ),
    ],
)
def test_options_of_longreach(given: Any, kind: type[LongreachError], message: str) -> None:
    with pytest.raises(kind, match=message):
        configure(given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
         r"does not work with speculative decoding"),
        ({"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}, r"KV connectors"),
        ({"kv_offloading_size": 1.0}, r"KV connectors and KV offloading"),
        ({"prefix_match_unit": 16}, r"cached prefixes that end within a page \(prefix_match_unit=16\)"),
        ({"kv_cache_dtype": "fp8"}, r"a quantised KV cache \(kv_cache_dtype=fp8"),
        ({"kv_cache_dtype": "bfloat16"}, r"another dtype than the model's \(kv_cache_dtype=bfloat16, dtype="),
        ({"pipeline_parallel_size": 2}, r"pipeline parallelism, as layers choose keys for layers of other ranks"),
        ({"runner": "pooling"}, r"runner=pooling, which decodes nothing"),
    ],
)  # fmt: skip
def test_engines(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        configure({"decode": "dense"}, **options)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("decode_context_parallel_size", 2, r"context parallelism"),
        ("prefill_context_parallel_size", 2, r"context parallelism"),
        ("enable_dbo", True, r"micro-batches"),
        ("tensor_parallel_size", 3, r"tensor_parallel_size=3: longreach needs as many KV heads on each rank"),
    ],
)
def test_parallel_engines_that_this_machine_cannot_configure(field: str, value: Any, message: str) -> None:
    from longreach.adapters.vllm.checks import check_engine

    config = configure({"decode": "dense"})
    setattr(config.parallel_config, field, value)
    with pytest.raises(Unsupported, match=message):
        check_engine(config)


def test_attention_within_chunks() -> None:
    from longreach.adapters.vllm.checks import check_engine

    config = configure({"decode": "dense"})
    config.model_config.hf_text_config.attention_chunk_size = 64
    with pytest.raises(Unsupported, match=r"attention within chunks \(as in Llama-4\)"):
        check_engine(config)


def test_a_head_map_that_crosses_ranks() -> None:
    from longreach.adapters.vllm.checks import check_engine

    config = configure({"decode": "kascade"})
    config.parallel_config.tensor_parallel_size = 2
    with pytest.raises(Unsupported, match=r"kascade: with 2 of 4 KV heads a rank, head \d of layer \d+ would need"):
        check_engine(config)


def test_a_key_that_is_misspelt() -> None:
    from vllm.engine.arg_utils import EngineArgs

    for given, refused in (({"Longreach": {"decode": "dense"}}, True), ({"another": 1}, False)):
        args = EngineArgs(model=str(MINI), dtype="float32", additional_config=given)
        if refused:
            with pytest.raises(UnknownName, match=r"config 'Longreach'; known: longreach"):
                args.create_engine_config()
        else:
            args.create_engine_config()


def test_a_plan_for_another_model(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    with pytest.raises(InvalidInput, match=r"is for longreach-mini, and this is another model: hash of the config"):
        configure({"decode": "kascade plan=kascade-longreach-mini"}, model=str(tmp_path), max_model_len=512)


def test_a_model_without_a_plan(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    with pytest.raises(InvalidInput, match=r"no loki plan is shipped for this model .* longreach calibrate loki"):
        configure({"decode": "loki"}, model=str(tmp_path), max_model_len=512)


def test_latent_attention(tmp_path: Path) -> None:
    folder = model(
        tmp_path, architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", hidden_size=64,
        intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, vocab_size=256,
        kv_lora_rank=16, q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
        max_position_embeddings=512, first_k_dense_replace=2, n_routed_experts=2,
    )  # fmt: skip
    with pytest.raises(Unsupported, match=r"multi-head latent attention \(MLA\); use another model"):
        configure({"decode": "dense"}, model=folder, skip_tokenizer_init=True, max_model_len=256)


def test_models_that_attend_across(tmp_path: Path) -> None:
    folder = model(
        tmp_path, architectures=["WhisperForConditionalGeneration"], model_type="whisper", d_model=64,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, vocab_size=300,
        encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=64, max_target_positions=64, num_mel_bins=8,
        is_encoder_decoder=True, decoder_start_token_id=1,
    )  # fmt: skip
    with pytest.raises(Unsupported, match=r"encoder-decoder models, which attend across; use a decoder-only model"):
        configure({"decode": "dense"}, model=folder, skip_tokenizer_init=True)


def test_recurrent_models(tmp_path: Path) -> None:
    folder = model(
        tmp_path, architectures=["Lfm2ForCausalLM"], model_type="lfm2", hidden_size=64, intermediate_size=96,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=256,
        layer_types=["conv", "full_attention"], max_position_embeddings=512,
    )  # fmt: skip
    with pytest.raises(Unsupported, match=r"models that have recurrent layers; use longreach\.generate"):
        configure({"decode": "dense"}, model=folder, skip_tokenizer_init=True, max_model_len=256)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_type": "encoder_only"}, r"attends in decoders only, and this layer is of type 'encoder_only'"),
        ({"attn_type": "encoder_decoder"}, r"attends in decoders only, and this layer is of type 'encoder_decoder'"),
        ({"alibi_slopes": [0.5, 0.25]}, r"has no ALiBi; use a model with rotary embeddings"),
        ({"kv_sharing_target_layer_name": "layers.0.attn"}, r"shares the keys of layers\.0\.attn"),
    ],
)
def test_layers(options: dict[str, Any], message: str) -> None:
    from vllm.config import set_current_vllm_config

    from longreach.adapters.vllm.cpu import CPUImpl

    given: dict[str, Any] = {"alibi_slopes": None, "attn_type": "decoder", "kv_sharing_target_layer_name": None}
    given |= options
    with set_current_vllm_config(configure({"decode": "dense"})), pytest.raises(Unsupported, match=message):
        CPUImpl(
            2, 64, 1.0, 2, given["alibi_slopes"], None, "auto", None, given["attn_type"],
            given["kv_sharing_target_layer_name"],
        )  # fmt: skip


def test_a_model_with_alibi(tmp_path: Path) -> None:
    """The whole way: its layers are refused before weights are loaded."""
    folder = model(
        tmp_path, architectures=["BloomForCausalLM"], model_type="bloom", hidden_size=64, n_layer=2, n_head=2,
        vocab_size=256, seq_length=512,
    )  # fmt: skip
    with (
        pytest.raises(Unsupported, match="has no ALiBi"),
        engine("dense", model=folder, skip_tokenizer_init=True, load_format="dummy", max_model_len=256),
    ):
        pass


def test_pages_that_do_not_fit() -> None:
    message = r"quest keeps state for blocks of 48 keys, and sequences may share pages of 32 slots"
    with pytest.raises(Unsupported, match=message), engine("quest page=48"):
        pass


def test_another_version_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", "0.29.1")
    with pytest.raises(Unsupported, match=r"vLLM 0\.29\.1: longreach works with vLLM 0\.26 and 0\.32; install one"):
        configure({"decode": "dense"})
