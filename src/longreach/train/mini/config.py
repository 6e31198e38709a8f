"""What longreach-mini is: its shape, special tokens and training schedule."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2


@dataclass(frozen=True)
class ModelShape:
    """A Llama-architecture decoder with tied embeddings; the fields have transformers' names."""

    vocab_size: int = 8192
    hidden_size: int = 320
    intermediate_size: int = 704
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 64
    max_position_embeddings: int = 32768
    rope_theta: float = 500000.0
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02

    def to_transformers(self) -> dict[str, Any]:
        """The content of config.json as transformers 5 reads it."""
        fields = asdict(self)
        theta = fields.pop("rope_theta")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "use_cache": True,
            "pad_token_id": PAD_ID,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            **fields,
        }


@dataclass(frozen=True)
class Schedule:
    """How training spends its time. Times are fractions of the budget, so it always ends on time."""

    # From each fraction on, the microbatches of a step cycle through these lengths: short ones keep teaching
    # (many questions per token) while long ones are learnt.
    stages: tuple[tuple[float, tuple[int, ...]], ...] = (
        (0.00, (512, 512, 512, 512)),
        (0.08, (1024, 512, 1024, 512)),
        (0.18, (2048, 1024, 2048, 512)),
        (0.32, (4096, 2048, 4096, 1024)),
        (0.56, (8192, 4096, 8192, 2048)),
        (0.78, (16384, 8192, 4096, 16384)),
    )
    microbatch_tokens: int = 65536
    microbatches: int = 4
    peak_lr: float = 2e-3
    final_lr: float = 2e-5
    warmup_steps: int = 150
    decay_from: float = 0.6
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    # The loss is mean(answer tokens) + text_loss * weighted mean(text tokens). Two means, because the share of
    # answer tokens falls with length and they must not drown.
    text_loss: float = 0.5
    context_weight: float = 0.07  # a token of a task's context or question, relative to one of plain text
    plain_text: float = 0.15  # share of sequences that are plain text

    def lengths(self, fraction: float) -> tuple[int, ...]:
        """Lengths that the microbatches cycle through after `fraction` of the time."""
        return [lengths for start, lengths in self.stages if start <= fraction or start == 0.0][-1]


# `grow` starts from random weights; `long` goes on from what another schedule ended with.
SCHEDULES = {
    "grow": Schedule(),
    "long": Schedule(
        stages=(
            (0.0, (16384, 8192, 4096, 16384)),
            (0.1, (32768, 16384, 4096, 32768, 8192, 16384, 2048, 16384)),
        ),
        peak_lr=8e-4,
        decay_from=0.2,
    ),
}


def schedule_name(schedule: Schedule) -> str | None:
    """What a schedule is called in SCHEDULES; None where it is not one of them."""
    return next((name for name, known in SCHEDULES.items() if known == schedule), None)
