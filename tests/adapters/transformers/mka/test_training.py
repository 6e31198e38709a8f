"""Training of converted models: transformers' Trainer, gradient checkpointing, autocast, groups of parameters, LoRA."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Trainer, TrainingArguments

import longreach
from longreach import mka
from longreach.errors import InvalidInput
from longreach.testing.tiny import random_tokens
from tests.adapters.transformers.mka.models import HASH, RECALL, THREE, TWO, close, converted, levels_of, original
from tests.adapters.transformers.reference import padded_batch

EACH = pytest.mark.parametrize("options", [TWO, THREE, HASH, RECALL], ids=["two", "three", "hash", "recall"])


def gradients(model: Any, tokens: Tensor, **given: Any) -> dict[str, Tensor]:
    model.zero_grad()
    model(tokens, labels=tokens, use_cache=False, **given).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@EACH
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(options: dict[str, Any], reentrant: bool) -> None:
    """Also where another batch goes through the model before the backward pass repeats the layers of the first."""
    model, tokens = converted(**options).train(), random_tokens(2, 30)
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    want = gradients(model, tokens, attention_mask=mask)
    assert len(want) == len(dict(model.named_parameters()))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.zero_grad()
    loss = model(tokens, labels=tokens, attention_mask=mask, use_cache=False).loss
    with torch.no_grad():
        model(random_tokens(3, 11, seed=9))
    loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, want[name]), name


def test_at_gate_zero_only_gates_have_a_gradient_of_mkas() -> None:
    model = converted(seed=None)
    for name, x in gradients(model, random_tokens(2, 30)).items():
        if ".mka." in name:
            assert bool(x.any()) == ("gate" in name), name


@torch.no_grad()
def test_checkpointing_without_a_cache_that_was_given_is_refused() -> None:
    model, tokens = converted().train(), random_tokens(1, 12)
    cache = model(tokens).past_key_values
    model.gradient_checkpointing_enable()
    with torch.enable_grad(), pytest.raises(InvalidInput, match="layers do not get the cache of this pass"):
        model(tokens, past_key_values=cache)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast(dtype: torch.dtype) -> None:
    """MKA's parameters in fp32 or bf16, activations in bf16: means and sums stay fp32."""
    model, tokens = converted(**THREE), random_tokens(2, 30)
    for levels in levels_of(model).values():
        for parameter in levels.parameters():
            parameter.data = parameter.data.to(dtype)
    model.gradient_checkpointing_enable()
    model.train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    plain = converted(**THREE)(tokens, labels=tokens, use_cache=False).loss
    assert abs(float((loss - plain).detach())) < 0.1
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), name


@torch.no_grad()
def test_decoding_under_autocast() -> None:
    model, tokens = converted(), random_tokens(1, 20)
    with torch.autocast("cpu", torch.bfloat16):
        want = model(tokens, use_cache=False).logits
        out = model(tokens[:, :12])
        carry = out.past_key_values.layers[0].held.memory.carry
        assert carry.mean.dtype == torch.float32
        parts = [out.logits]
        for n in range(12, 20):
            parts.append(model(tokens[:, n : n + 1], past_key_values=out.past_key_values).logits)
    close(torch.cat(parts, 1).float(), want.float(), 0.05)


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        **{
            "output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
            "weight_decay": 0.1, "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True,
            "logging_strategy": "no", "seed": 1, **more,
        }
    )  # fmt: skip


def samples(count: int = 16) -> list[dict[str, Any]]:
    return [{"input_ids": x, "labels": x} for x in random_tokens(count, 24).unbind(0)]


def trained(model: Any, folder: Path, resume: Any = None, data: Any = None, collator: Any = None, **more: Any) -> Any:
    options = {} if collator is None else {"data_collator": collator}
    trainer = Trainer(model=model, args=arguments(folder, **more), train_dataset=data or samples(), **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"gradient_checkpointing": True, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1},
        {"bf16": True},
    ],
    ids=["plain", "checkpointing", "bf16"],
)
def test_trainer(more: dict[str, Any], tmp_path: Path) -> None:
    model = converted(**THREE)
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    trainer = trained(model, tmp_path, **more)
    same = [name for name, x in model.named_parameters() if torch.equal(x, before[name])]
    assert not [name for name in same if ".mka." in name], same
    decayed = trainer.get_decay_parameter_names(model)
    assert any("mka.router.up.weight" in name for name in decayed)
    assert not any("gate.bias" in name or "decay.bias" in name for name in decayed)


def test_accumulation_equals_one_batch(tmp_path: Path) -> None:
    whole, parts = converted(), converted()
    sgd = {"max_steps": 2, "optim": "sgd"}
    trained(whole, tmp_path, per_device_train_batch_size=2, **sgd)
    trained(parts, tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=2, **sgd)
    for name, x in whole.state_dict().items():
        assert torch.allclose(parts.state_dict()[name], x, atol=1e-5), name


def test_training_resumes(tmp_path: Path) -> None:
    mka.register()
    whole = converted()
    trained(whole, tmp_path / "whole")
    trained(converted(), tmp_path / "part", save_strategy="steps", save_steps=2)
    fresh = converted()
    trained(fresh, tmp_path / "part", resume=str(tmp_path / "part" / "checkpoint-2"))
    for name, x in whole.state_dict().items():
        assert torch.allclose(fresh.state_dict()[name], x, atol=1e-5), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "part" / "checkpoint-4", attn_implementation="eager")
    close(loaded(random_tokens(1, 9)).logits, whole(random_tokens(1, 9)).logits, 1e-3)


def test_label_smoothing_shifts_labels(tmp_path: Path) -> None:
    """transformers finds by the class's name whether labels are to be shifted."""
    tokens, found = random_tokens(2, 12), []
    for model in (copy.deepcopy(original("llama")), converted(seed=None)):
        trainer = Trainer(model=model, args=arguments(tmp_path, label_smoothing_factor=0.1), train_dataset=samples())
        loss: Any = trainer.compute_loss(model, {"input_ids": tokens, "labels": tokens.clone()})
        found.append(loss)
    assert torch.equal(found[0], found[1])


def test_training_on_left_padded_text(tmp_path: Path) -> None:
    tokens, mask = padded_batch((24, 11))
    labels = tokens.masked_fill(mask == 0, -100)
    each = zip(tokens, mask, labels, strict=True)
    data = [{"input_ids": x, "attention_mask": m, "labels": y} for x, m, y in each]
    model = converted()
    trained(model, tmp_path, data=data, max_steps=2)
    assert all(x.isfinite().all() for x in model.parameters())


def test_training_on_packed_text(tmp_path: Path) -> None:
    """Trainer's own collator packs documents into one row; the loss is that of the documents alone."""
    model, data = converted(**THREE), [{"input_ids": x.tolist()} for x in random_tokens(4, 17).unbind(0)]
    batch = {
        name: torch.as_tensor(x) for name, x in DataCollatorWithFlattening()(data).items() if name != "attention_mask"
    }
    assert (batch["position_ids"] == 0).sum() == 4
    got = model(**batch, use_cache=False).loss
    alone = torch.stack(
        [model(torch.tensor([d["input_ids"]]), labels=torch.tensor([d["input_ids"]])).loss for d in data]
    )
    close(got, alone.mean())
    trained(model, tmp_path, data=data, max_steps=2, collator=DataCollatorWithFlattening())


def test_groups_of_parameters() -> None:
    model = converted(**HASH)
    groups = mka.parameter_groups(model, 1e-3, 5e-2, 0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, plain, gates = ([names[id(p)] for p in group["params"]] for group in groups)
    assert len(decayed) + len(plain) + len(gates) == len(names) == len({*decayed, *plain, *gates})
    assert [(g["lr"], g["weight_decay"]) for g in groups] == [(1e-3, 0.1), (1e-3, 0.0), (5e-2, 0.0)]
    assert len(gates) == 2 and all("router.gate.bias" in name for name in gates)
    assert all("norm" in name or name.endswith("bias") for name in plain)
    assert "model.layers.0.self_attn.mka.router.up.weight" in decayed and "model.embed_tokens.weight" in decayed
    torch.optim.AdamW(groups).step()
    for parameter in model.model.parameters():
        parameter.requires_grad_(False)
    for levels in levels_of(model).values():
        levels.router.gate.requires_grad_(True)
    frozen = mka.parameter_groups(model, 1e-3)
    assert [len(g["params"]) for g in frozen] == [1, 2] and frozen[1]["lr"] == pytest.approx(1e-2)
    with pytest.raises(InvalidInput, match="expected a model with MKA's layers"):
        mka.parameter_groups(original("llama"), 1e-3)


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_lora(name: str, tmp_path: Path) -> None:
    """An adapter on the projections: keys are mixed after its part is added."""
    peft = pytest.importorskip("peft")
    model, tokens = converted(name, **THREE), random_tokens(2, 26)
    targets = ["qkv_proj"] if name == "phi3" else ["q_proj", "k_proj", "v_proj"]
    wanted = copy.deepcopy(model)
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, modules_to_save=["mka"])
    adapted = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        got = adapted(tokens).logits
        assert not torch.allclose(got, wanted(tokens).logits, atol=0.1)
        out = adapted(tokens[:, :15])
        rest = adapted(tokens[:, 15:], past_key_values=out.past_key_values).logits
        close(torch.cat([out.logits, rest], 1), got)
        for module, other in zip(attention_of(adapted), attention_of(wanted), strict=True):
            for target in targets:
                other._modules[target].weight += module._modules[target].get_delta_weight("default")
        close(got, wanted(tokens).logits)
    adapted.train()
    adapted(tokens, labels=tokens, use_cache=False).loss.backward()
    grads = {n: p.grad for n, p in adapted.named_parameters() if p.requires_grad}
    assert all(x is not None and bool(x.any()) for n, x in grads.items() if "lora" in n or "gate" in n)
    assert any("modules_to_save.default.router.gate.bias" in n for n in grads)
    assert len(mka.parameter_groups(adapted, 1e-3)) == 3
    adapted.eval()
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(converted(name, **THREE), tmp_path).eval()
    close(again(tokens).logits, got)
    merged = again.merge_and_unload()
    close(merged(tokens).logits, got)
    with longreach.attach(merged):
        close(merged(tokens, use_cache=False).logits, got)


def attention_of(model: Any) -> list[Any]:
    return [m for m in model.modules() if hasattr(m, "o_proj")]
