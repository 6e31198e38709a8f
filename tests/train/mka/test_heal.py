"""Healing: the loss falls, what is frozen stays, training resumes to the bit, and what is wrong is refused."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiers import swept
from tests.train.mka.conftest import text

from longreach.adapters.transformers.mka import convert
from longreach.errors import InvalidInput, LongreachError, ModelFileError, OutOfMemory, UnknownName, Unsupported
from longreach.testing.tiny import tiny_model
from longreach.train.mini.page import TEXT
from longreach.train.mka import heal as healing
from longreach.train.mka.budgets import Budget
from longreach.train.mka.checkpoint import JOURNAL, RECORD, STATE
from longreach.train.mka.data import Batch, Source, TextSource
from longreach.train.mka.heal import heal
from longreach.train.mka.options import HealOptions

OPTIONS = HealOptions(steps=6, lengths=(48, 24), batch_tokens=96, accumulate=2, learning_rate=2e-3)

THREE = {"tiers": (1, 2, 3)}


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def moved(model: Any, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(weights(a).values(), weights(b).values(), strict=True))


def test_healing_brings_a_model_closer_to_its_original(student: Any, teacher: Any, source: Source) -> None:
    lines: list[dict[str, Any]] = []
    record = heal(student, [source], replace(OPTIONS, steps=15, train="all"), teacher=teacher,
                  on_step=lambda step, line: lines.append(line))  # fmt: skip
    assert record["complete"] and record["steps"] == len(lines) == 15 and record["skipped"] == 0
    assert record["tokens"] == sum(line["tokens"] for line in lines) == 15 * 2 * 96
    assert record["after"]["kl"] < 0.6 * record["before"]["kl"]
    assert record["after"]["agreement"] > record["before"]["agreement"]
    assert {"options", "sources", "versions", "commit", "seconds", "device"} <= record.keys()
    first, last = lines[0], lines[-1]
    assert last["kl"] < first["kl"] and first["loss"] == pytest.approx(first["kl"]) and len(first["gates"]) == 2
    assert first["lengths"] == [48, 24] and first["gates"] == (0.5, 0.5) != last["gates"]
    assert [line["rate"] for line in lines] == sorted((line["rate"] for line in lines), reverse=True)
    assert not student.training and all(p.requires_grad and p.grad is None for p in student.parameters())


@pytest.mark.parametrize(
    ("variant", "given"),
    swept(
        [
            ("mka", {"tiers": (1, 2)}),
            ("block_mka", {"recall": "index"}),
            ("mka", {"mode": "gated"}),
            ("block_mka", {"recall": "hash", "bits": 16}),
        ],
        2,
    ),
)
def test_every_variant_is_healed(teacher: Any, source: Source, variant: str, given: dict[str, Any]) -> None:
    given = {**({"block": 4, "window": 8, "blocks": 2} if "tiers" not in given else {}), **given}
    torch.manual_seed(0)
    model = convert(tiny_model("llama"), variant, gate=1.0, **given)
    before = weights(model)
    options = replace(OPTIONS, steps=8, train="all", learning_rate=5e-4, gate_rate=0.05)
    record = heal(model, [source], options, teacher=teacher)
    assert record["after"]["kl"] < record["before"]["kl"]
    assert moved(model, before) == {name for name in before if ".mka.index." not in name}


@pytest.mark.parametrize("train", ["levels", "attention", "all"])
def test_what_is_not_trained_stays(teacher: Any, source: Source, train: str) -> None:
    model = convert(tiny_model("llama"), "fastmka", gate=0.5, layers=[1])
    before = weights(model)
    heal(model, [source], replace(OPTIONS, steps=2, train=train), teacher=teacher)
    changed = moved(model, before)
    added = {name for name in before if ".mka." in name}
    attention = {name for name in before if name.startswith("model.layers.1.self_attn.")}
    assert changed == {"levels": added, "attention": attention, "all": set(before)}[train]


def test_without_a_teacher_the_next_token_is_learnt(student: Any, tokenizer: Any) -> None:
    words = text(3000)
    words = replace(words, tokens=tuple(t % 4 + 97 for t in words.tokens))
    record = heal(student, [TextSource([words], tokenizer, (48,))],
                  replace(OPTIONS, steps=15, lengths=(48,), train="all", kl=0, nll=1))  # fmt: skip
    assert record["after"]["nll"] < 0.8 * record["before"]["nll"] and record["after"]["kl"] is None


def test_checkpointing_changes_nothing(teacher: Any, source: Source) -> None:
    models = [convert(tiny_model("llama"), "fastmka", gate=0.5) for _ in range(2)]
    for layer in range(2):  # routers are drawn at random
        models[1].model.layers[layer].self_attn.mka.load_state_dict(
            models[0].model.layers[layer].self_attn.mka.state_dict()
        )
    for model, checkpointing in zip(models, (False, True), strict=True):
        heal(model, [source], replace(OPTIONS, steps=2, checkpointing=checkpointing), teacher=teacher)
    assert same(*models) and not any(getattr(m, "gradient_checkpointing", False) for m in models[1].modules())


class Interrupt:
    """Ctrl-C after some steps."""

    def __init__(self, after: int):
        self.after = after

    def __call__(self, step: int, line: dict[str, Any]) -> None:
        if step == self.after:
            signal.raise_signal(signal.SIGINT)


def test_an_interrupted_training_resumes_to_the_bit(teacher: Any, source: Source, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make: Callable[[], Any] = lambda: convert(tiny_model("llama"), "fastmka", gate=0.5)  # noqa: E731
    whole, part = make(), make()
    part.load_state_dict(whole.state_dict())
    saved = []
    expected = heal(whole, [source], OPTIONS, teacher=teacher, folder=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt) as stopped:
        heal(part, [source], OPTIONS, teacher=teacher, folder=tmp_path / "part", save=saved.append,
             on_step=Interrupt(3))  # fmt: skip
    assert "step 3 is saved in" in stopped.value.__notes__[0] and signal.getsignal(signal.SIGINT) is not None
    assert saved == [tmp_path / "part"] and not same(whole, part)
    assert json.loads((tmp_path / "part" / RECORD).read_text())["complete"] is False
    with pytest.raises(InvalidInput, match="unfinished training; continue it with --resume"):
        heal(part, [source], OPTIONS, teacher=teacher, folder=tmp_path / "part")
    with pytest.raises(InvalidInput, match="other clip, seed; resume with the same"):
        heal(part, [source], replace(OPTIONS, seed=1, clip=2.0), teacher=teacher, folder=tmp_path / "part", resume=True)
    again = convert(tiny_model("llama"), "fastmka")  # as a new process loads it
    again.load_state_dict(part.state_dict())
    for name, p in again.named_parameters():  # the state alone says what was trained
        p.data.add_(1.0 if ".self_attn." in name else 0.0)
    record = heal(again, [source], OPTIONS, teacher=teacher, folder=tmp_path / "part", resume=True)
    assert same(again, whole)
    for name in ("steps", "tokens", "before", "after"):
        assert record[name] == expected[name]
    lines = [[json.loads(line) for line in (tmp_path / folder / JOURNAL).read_text().splitlines()]
             for folder in ("whole", "part")]  # fmt: skip
    assert [line["loss"] for line in lines[0]] == [line["loss"] for line in lines[1]] and len(lines[0]) == 6
    assert not (tmp_path / "part" / STATE).exists()
    with pytest.raises(
        InvalidInput, match=r"no training-state.safetensors to resume from \(its training is complete\)"
    ):
        heal(part, [source], OPTIONS, teacher=teacher, folder=tmp_path / "part", resume=True)


def test_lines_after_the_last_checkpoint_are_written_again(
    student: Any, teacher: Any, source: Source, tmp_path: Path
) -> None:
    """A process that was killed leaves a journal that is longer than its checkpoint."""

    def killed(step: int, line: dict[str, Any]) -> None:
        if step == 3:
            raise SystemExit

    with pytest.raises(SystemExit):
        heal(student, [source], OPTIONS, teacher=teacher, folder=tmp_path, save_every=0, on_step=killed)
    assert len((tmp_path / JOURNAL).read_text().splitlines()) == 3  # the checkpoint is of step 2
    record = heal(student, [source], OPTIONS, teacher=teacher, folder=tmp_path, resume=True)
    lines = [json.loads(line) for line in (tmp_path / JOURNAL).read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(6)) and record["steps"] == 6


def test_texts_that_are_used_up_leave_the_model(student: Any, teacher: Any, tokenizer: Any, tmp_path: Path) -> None:
    short, saved = TextSource([text(60)], tokenizer, (24,)), list[Path]()
    with pytest.raises(InvalidInput, match=r"the texts hold \d+ different sequences of 24 tokens") as raised:
        heal(student, [short], replace(OPTIONS, lengths=(24,), steps=100), teacher=teacher, folder=tmp_path,
             save=saved.append)  # fmt: skip
    assert saved == [tmp_path] and "the model after step" in raised.value.__notes__[0]
    assert 0 < json.loads((tmp_path / RECORD).read_text())["steps"] < 100


def test_memory_that_runs_out_names_the_options_to_lower(
    student: Any, teacher: Any, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(healing.Trainer, "step", full)
    with pytest.raises(OutOfMemory, match="lower --batch-tokens"):
        heal(student, [source], OPTIONS, teacher=teacher)


def test_a_broken_state_is_refused(student: Any, teacher: Any, source: Source, tmp_path: Path) -> None:
    (tmp_path / STATE).write_bytes(b"no safetensors")
    with pytest.raises(ModelFileError, match="cannot read"):
        heal(student, [source], OPTIONS, teacher=teacher, folder=tmp_path, resume=True)


class Poison(Source):
    """Steps of these numbers have a NaN in the model."""

    def __init__(self, model: Any, steps: range):
        self.weight, self.steps = model.model.norm.weight, steps

    def sequences(self, length: int, first: int, count: int) -> Batch:
        return self.held_out(length, count)

    def held_out(self, length: int, count: int) -> Batch:
        tokens = np.random.default_rng(0).integers(32, 127, (count, length + 1))
        return Batch(tokens, np.full((count, length), TEXT, dtype=np.uint8))

    def describe(self) -> dict[str, Any]:
        return {}

    def between(self, step: int, line: dict[str, Any]) -> None:
        self.weight.data.fill_(torch.nan if step in self.steps else 1.0)


def test_steps_that_are_not_finite_are_skipped_and_counted(
    student: Any, teacher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, poison = replace(OPTIONS, lengths=(24,)), Poison(student, range(2, 4))
    lines: list[dict[str, Any]] = []

    def on_step(step: int, line: dict[str, Any]) -> None:
        lines.append(line)
        poison.between(step, line)

    record = heal(student, [poison], options, teacher=teacher, on_step=on_step)
    assert (
        record["skipped"] == 2
        and [line.get("skipped", False) for line in lines] == [False] * 2 + [True] * 2 + [False] * 2
    )
    assert all(bool(p.isfinite().all()) for p in student.parameters()) and json.dumps(record, allow_nan=False)
    monkeypatch.setattr(healing, "MAX_BAD_STEPS", 3)
    endless = Poison(student, range(1, 100))
    with pytest.raises(LongreachError, match="3 steps in a row had a loss or gradient that is not finite; lower"):
        heal(student, [endless], options, teacher=teacher, on_step=endless.between)
    student.model.norm.weight.data.fill_(1.0)


@pytest.mark.parametrize(
    ("variant", "given"),
    swept(
        [
            ("fastmka", {}),
            ("mka", {"mode": "gated"}),
            ("block_mka", {}),
            ("mka", {}),
            ("fastmka", {"tiers": (1, 2, 3)}),
        ],
        3,
    ),
)
def test_training_in_bf16_as_a_gpu_does(
    source: Source, monkeypatch: pytest.MonkeyPatch, variant: str, given: dict[str, Any]
) -> None:
    monkeypatch.setattr(healing.Trainer, "autocast", lambda self: torch.autocast("cpu", torch.bfloat16))
    torch.manual_seed(0)
    small = {} if given == {} and variant == "fastmka" else {"block": 4, "window": 8, "blocks": 2}
    model = convert(tiny_model("llama"), variant, gate=1.0, **small, **given)
    options = replace(OPTIONS, steps=4, train="all", learning_rate=5e-4, gate_rate=0.05, checkpointing=True)
    record = heal(model, [source], options, teacher=tiny_model("llama").bfloat16())
    assert record["after"]["kl"] < record["before"]["kl"] and record["skipped"] == 0
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_budgets_are_drawn_for_each_step_and_put_back(teacher: Any, source: Source) -> None:
    model = convert(tiny_model("llama"), "block_mka", block=4, window=8, blocks=2)
    budgets = (Budget(8, 1), Budget(4, 2), Budget(16, 4))
    lines: list[dict[str, Any]] = []
    heal(model, [source], replace(OPTIONS, budgets=budgets, batch_tokens=48, steps=8), teacher=teacher,
         on_step=lambda step, line: lines.append(line))  # fmt: skip
    drawn = [tuple(line["budget"]) for line in lines]
    assert set(drawn) <= set(budgets) and len(set(drawn)) > 1
    assert all(layer.self_attn.mka.config.window == 8 for layer in model.model.layers)
    with pytest.raises(InvalidInput, match="multiple of block=4, got 6"):
        heal(model, [source], replace(OPTIONS, budgets=(Budget(6, 1),)), teacher=teacher)


def test_a_budget_in_minutes_ends_in_time(student: Any, teacher: Any, source: Source) -> None:
    totals: list[tuple[str, int]] = []
    done: list[int] = []

    @contextmanager
    def progress(what: str, total: int):  # type: ignore[no-untyped-def]
        totals.append((what, total))
        yield lambda n: done.append(n) if what.startswith("training") else None

    options = replace(OPTIONS, steps=None, minutes=1.5 / 60, warmup=0)
    record = heal(student, [source], options, teacher=teacher, progress=progress)
    assert 1.5 <= record["seconds"] < 10 and record["steps"] >= 1
    assert ("training, seconds", 2) in totals and 1 <= sum(done) <= 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": None}, "steps, minutes: expected one"),
        ({"minutes": 1.0}, "steps, minutes: expected one"),
        ({"steps": 0}, "steps: expected an int of at least 1"),
        ({"steps": None, "minutes": -1.0}, "minutes: expected a number above 0"),
        ({"accumulate": 0}, "accumulate: expected an int of at least 1"),
        ({"learning_rate": float("nan")}, "learning_rate: expected a number above 0"),
        ({"learning_rate": "a"}, "learning_rate: expected a number above 0, got 'a'"),
        ({"steps": 1.5}, "steps: expected an int of at least 1, got 1.5"),
        ({"batch_tokens": True}, "batch_tokens: expected an int"),
        ({"accumulate": None}, "accumulate: expected an int"),
        ({"lengths": ()}, "lengths: expected one or more ints of at least 2"),
        ({"lengths": (0,)}, "lengths: expected one or more ints"),
        ({"lengths": 512}, "lengths: expected one or more ints"),
        ({"warmup": 0.5}, "warmup: expected an int of at least 0"),
        ({"seed": "a"}, "seed: expected an int"),
        ({"clip": float("inf")}, "clip: expected a number above 0"),
        ({"kl": None}, "kl: expected a number of at least 0, got None"),
        ({"weight_decay": -0.1}, "weight_decay: expected a number of at least 0"),
        ({"kl": 0.0}, "kl, nll: expected a weight above 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        replace(OPTIONS, **change)


def test_unknown_parts_of_a_model_are_listed() -> None:
    with pytest.raises(UnknownName, match="known: levels, attention, all"):
        replace(OPTIONS, train="gates")  # type: ignore[arg-type]


def test_models_and_teachers_that_do_not_fit_are_refused(student: Any, teacher: Any, source: Source) -> None:
    def refused(words: str, model: Any = student, of: Any = teacher, kind: type = InvalidInput, **change: Any) -> None:
        with pytest.raises(kind, match=words):
            heal(model, [source], replace(OPTIONS, **change), teacher=of)

    refused("expected at most 4096 tokens, the model's context, got 5000", lengths=(5000,))
    refused("without a teacher there is nothing to diverge from", of=None)
    refused("expected another model than the one that is trained", of=student)
    refused("same vocabulary, 264 tokens, got one of 300", of=tiny_model("llama", vocab_size=300))
    refused("the model has no such parameters; convert it", model=tiny_model("llama"), of=teacher, train="levels")
    refused(
        "load the model with dtype=torch.float32", model=convert(tiny_model("llama"), "fastmka", gate=0.5).bfloat16()
    )
    refused("recalls no blocks", budgets=(Budget(64, 1),))
    refused("changes its logits after the output layer", of=tiny_model("gemma2"), kind=Unsupported)
    with pytest.raises(InvalidInput, match="nothing to train on"):
        heal(student, [], OPTIONS, teacher=teacher)


def test_a_model_that_equals_its_teacher_is_warned_of(teacher: Any, source: Source) -> None:
    with pytest.warns(UserWarning, match=r"same distributions \(KL 0\), so there is nothing to learn but rounding"):
        heal(convert(tiny_model("llama"), "fastmka"), [source], replace(OPTIONS, steps=1), teacher=teacher)


def test_resume_begins_where_nothing_was_saved(student: Any, teacher: Any, source: Source, tmp_path: Path) -> None:
    options = replace(OPTIONS, steps=1)
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / JOURNAL).write_text("before the first checkpoint")
    for folder in (tmp_path / "new", tmp_path / "killed"):
        heal(student, [source], options, teacher=teacher, folder=folder, resume=True)
        assert json.loads((folder / RECORD).read_text())["complete"]
        assert len((folder / JOURNAL).read_text().splitlines()) == 1


def test_a_baseline_without_levels_is_healed_too(teacher: Any, source: Source) -> None:
    model = tiny_model("llama", seed=3)
    before = weights(model)
    record = heal(model, [source], replace(OPTIONS, steps=2), teacher=teacher)
    assert moved(model, before) == {name for name in before if ".self_attn." in name}
    assert record["after"]["kl"] < record["before"]["kl"]
