"""One rank of a tensor-parallel run of every configuration: python two_ranks.py MODEL_DIR OUT STORE PLANS.

RANK, LOCAL_RANK and WORLD_SIZE come from the environment, where transformers looks for them too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import longreach
from longreach.cache import CacheConfig
from longreach.methods.base import AttentionMethod
from longreach.testing.tiny import random_tokens
from tests.methods.cases import CONFIGS
from tests.methods.drive import in_phase
from tests.methods.planned import planned

NEW = 6


def answers(
    model: PreTrainedModel, configurations: Sequence[AttentionMethod]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Configuration -> (tokens [B, N], logits of the prompt [B, T, V]) of a ragged batch in paged memory."""
    tokens = random_tokens(2, 40)
    mask = torch.ones_like(tokens)
    mask[1, :9] = 0
    found = {}
    for method in configurations:
        methods = {"prefill": in_phase(method, "prefill"), "decode": in_phase(method, "decode")}
        with longreach.attach(model, **methods, cache=CacheConfig("paged", page=10)):
            out = model.generate(
                tokens,
                attention_mask=mask,
                max_new_tokens=NEW,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
            found[repr(method)] = out.sequences, torch.stack(out.logits, 1)
    return found


def main(directory: str, out: str, store: str, plans: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, distributed_config=DistributedConfig(tp_plan="auto")
    ).eval()
    with planned(Path(plans)):
        found = answers(model, [method for _, method in CONFIGS])
    heads = model.model.layers[0].self_attn.k_proj.weight.to_local().shape[0]
    torch.save((heads, found), f"{out}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
