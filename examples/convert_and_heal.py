"""Convert a model to Block-MKA, and train it for a few steps to answer as before.

Run: python examples/convert_and_heal.py [MODEL] [STEPS] [FOLDER]

Twenty steps take a minute on a CPU and heal nothing yet; docs/mka.md shows what some minutes on a GPU do.
"""

import sys
from pathlib import Path

import torch

import longreach
from longreach.adapters.transformers import save
from longreach.tasks import registry
from longreach.train.mka.data import TaskSource
from longreach.train.mka.distance import distance
from longreach.train.mka.heal import heal
from longreach.train.mka.options import HealOptions

LENGTH = 640

name, steps, folder = [*sys.argv[1:], *("mini", "20", "healed")[len(sys.argv) - 1 :]]
original, tokenizer = longreach.load(name)
model, _ = longreach.load(name, dtype=torch.float32)
longreach.convert(model, "block_mka", block=16, window=64, blocks=4)

prompts = TaskSource([registry.task("niah_single_2"), registry.task("niah_single_3")], tokenizer, (LENGTH,))
held_out = [prompts.held_out(LENGTH, 2)]
before = distance(model, original, held_out)
options = HealOptions(steps=int(steps), lengths=(LENGTH,), batch_tokens=LENGTH, accumulate=1, learning_rate=1e-4)
record = heal(model, [prompts], options, teacher=original)
after = distance(model, original, held_out)
for when, found in (("converted", before), (f"after {record['steps']} steps", after)):
    print(f"{when}: KL {found.kl:.4f}, same first choice for {found.agreement:.1%} of tokens")

save(model, tokenizer, Path(folder))
print(f"written to {folder}: longreach eval --model {folder} --tasks niah_single_2 --length {LENGTH}")
