"""Tiny models of every supported family, and a complete tiny model directory, for tests.

Weights are drawn with std 0.2: with the usual 0.02 attention moves no greedy token and tests would be blind
to it. What transformers fills with constants (norms, biases, sinks) is made random too, so that all is visible.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

RANGE = 0.2
WINDOW = 16  # of sliding layers, smaller than any test's prompt
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
PAD_ID, BOS_ID, EOS_ID = 256, 257, 258
VOCABULARY = 264  # 256 bytes, 3 special tokens, and even on any small number of ranks

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": RANGE,
    "tie_word_embeddings": False,
    "pad_token_id": PAD_ID,
    "bos_token_id": BOS_ID,
    "eos_token_id": None,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 32}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, **_EXPERTS}),
    "phi3": ("phi3", {}),
    "glm4": (
        "glm4",
        {
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "llama_yarn": (
        "llama",
        {
            "max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama_llama3": (
        "llama",
        {
            "max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 4,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 30.0,
            "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}

_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
}
_SHARED: dict[str, Any] = {"num_experts": 4, **_EXPERTS, "shared_expert_intermediate_size": 32}
_CONV: dict[str, Any] = {"layer_types": ["conv", "full_attention"] * 2}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {  # of 4 layers, 2 of which attend (all in falcon_h1)
    "lfm2": ("lfm2", _CONV),
    "lfm2_moe": ("lfm2_moe", {**_CONV, "num_experts": 4, **_EXPERTS, "num_dense_layers": 1}),
    "qwen3_next": ("qwen3_next", {**_DELTA, **_SHARED}),
    "qwen3_5": ("qwen3_5_text", _DELTA),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**_DELTA, **_SHARED}),
    "jamba": (
        "jamba",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
        },
    ),
    "bamba": ("bamba", {"attn_layer_indices": [1, 3], **_MAMBA}),
    "falcon_h1": ("falcon_h1", {**_MAMBA, "mamba_d_ssm": 128, "num_hidden_layers": 2}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            "layer_types": ["mamba", "attention"] * 2,
            **_MAMBA,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "position_embedding_type": "rope",
        },
    ),
    "olmo_hybrid": ("olmo_hybrid", {**_DELTA, "linear_num_value_heads": 2, "linear_value_head_dim": 32}),
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention", "mlp", "attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
        },
    ),
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 16,  # of some families' rotary embedding
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 16,
}
_GROUPED: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    **_EXPERTS,
}
LATENTS: dict[str, tuple[str, dict[str, Any]]] = {  # multi-head latent attention (MLA)
    "deepseek_v2": ("deepseek_v2", {**_LATENT, **_GROUPED}),
    "deepseek_v2_lite": ("deepseek_v2", {**_LATENT, **_GROUPED, "q_lora_rank": None}),
    "deepseek_v3": ("deepseek_v3", {**_LATENT, **_GROUPED}),
    "minicpm3": ("minicpm3", _LATENT),
    "youtu": ("youtu", _LATENT),
    "glm4_moe_lite": ("glm4_moe_lite", {**_LATENT, **_GROUPED}),
    "axk1": ("axk1", {**_LATENT, **_GROUPED}),
}
_GEMMA4: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
    "global_head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 30.0,
}
BY_LAYER: dict[str, tuple[str, dict[str, Any]]] = {  # layers without a window have other heads
    "gemma4": (
        "gemma4_text",
        {**_GEMMA4, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0},
    ),
    "gemma4_inputs": (
        "gemma4_text",
        {**_GEMMA4, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY},
    ),
}
_ALL = {**FAMILIES, **HYBRIDS, **LATENTS, **BY_LAYER}


def tiny_model(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A tiny fp32 model in eval mode: 2 attention layers, 4 query and 2 KV heads of 16 channels, no end-of-text token.

    Models with MLA have 4 heads, and 48 channels in the cache. Those of BY_LAYER have 2 more layers, without a window,
    whose heads have 32 channels.

    family: one of FAMILIES, HYBRIDS, LATENTS or BY_LAYER; overrides: fields of the model's configuration.
    """
    kind, fields = _ALL[family]
    shape = {**SHAPE, "num_hidden_layers": 4} if family in HYBRIDS else SHAPE
    return from_config(AutoConfig.for_model(kind, **{**shape, **fields, **overrides}), seed=seed)


def from_config(config: Any, *, seed: int = 0, auto: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """A model of any configuration, eager attention, fp32, all its parameters random and of visible size."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = auto.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        randomise(model)
    return model


@torch.no_grad()
def randomise(model: PreTrainedModel) -> None:
    """Move what was filled with constants: norms vary by 20 %, biases are of size 0.2, sinks the size of a lse."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape)
        if name.endswith("sinks"):
            parameter.copy_(2.0 * noise + 8.0)
        elif name.endswith("bias"):
            parameter.copy_(RANGE * noise)
        elif parameter.dim() == 1:
            parameter.add_(RANGE * noise)


def random_tokens(batch: int, length: int, *, seed: int = 0) -> Tensor:
    """int64 [batch, length] of byte tokens, none of them special."""
    return torch.randint(0, PAD_ID, (batch, length), generator=torch.Generator().manual_seed(seed))


def tiny_tokenizer(*, chat: bool = False) -> PreTrainedTokenizerFast:
    """One token a byte, plus padding, start and end; any text round-trips. chat: give it a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({char: n for n, char in enumerate(alphabet)}, []))
    core.add_special_tokens([PAD, BOS, EOS])
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    if chat:
        tokenizer.chat_template = (
            "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}"
        )
    return tokenizer


def save_tiny(
    directory: str | Path, family: str = "llama", *, chat: bool = False, seed: int = 0, **overrides: Any
) -> Path:
    """Write a complete model directory (config.json, model.safetensors, tokenizer.json), return its path.

    The saved model ends at EOS_ID, unlike `tiny_model`'s. chat: the tokenizer gets a chat template.
    """
    path = Path(directory)
    model = tiny_model(family, seed=seed, **{"eos_token_id": EOS_ID, **overrides})
    model.save_pretrained(path)
    tiny_tokenizer(chat=chat).save_pretrained(path)
    return path
