"""The training loop: a fixed time budget, lengths that grow, accuracy by task as it goes.

No sequence is seen twice, so accuracy on the batches trained with, before each update, is accuracy on new ones.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from longreach.errors import InvalidInput, LongreachError
from longreach.records import environment
from longreach.train.mini import checkpoint
from longreach.train.mini.batches import NAMES, Batch, BatchFactory
from longreach.train.mini.config import ModelShape, Schedule, schedule_name
from longreach.train.mini.model import Llama, token_losses
from longreach.train.mini.page import ANSWER, CONTEXT, TEXT

MAX_BAD_STEPS = 20
LOSSES = ("answer", "text")  # of answers' tokens, of plain text's
Pairs = list[tuple[float, float]]


class Step(NamedTuple):
    """losses: sum and number of each of LOSSES; forms: answer tokens right and in all, by NAMES."""

    loss: float
    grad_norm: float
    losses: Pairs
    forms: Pairs


def added(one: Pairs, other: Pairs) -> Pairs:
    return [(a + c, b + d) for (a, b), (c, d) in zip(one, other, strict=True)]


def ratios(names: Sequence[str], pairs: Pairs) -> dict[str, float]:
    """By name, of those with anything to divide by."""
    return {name: part / whole for name, (part, whole) in zip(names, pairs, strict=True) if whole}


def learning_rate(schedule: Schedule, fraction: float, step: int) -> float:
    """Warm-up by steps, a plateau, then a cosine to the final rate at fraction 1."""
    warm = min(1.0, (step + 1) / schedule.warmup_steps)
    if fraction <= schedule.decay_from:
        return schedule.peak_lr * warm
    progress = min(1.0, (fraction - schedule.decay_from) / (1 - schedule.decay_from))
    span = schedule.peak_lr - schedule.final_lr
    return (schedule.final_lr + span * 0.5 * (1 + math.cos(math.pi * progress))) * warm


class Trainer:
    """Model, optimiser and loss on one device: bf16 on CUDA, fp32 on the CPU; fp32 master weights on both."""

    def __init__(self, shape: ModelShape, schedule: Schedule, device: str, compile_layers: bool):
        self.schedule, self.device = schedule, torch.device(device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.model = Llama(shape).to(self.device)
        self.losses: Callable[..., tuple[Tensor, Tensor]] = token_losses
        if compile_layers:
            torch._dynamo.config.recompile_limit = 64
            for layer in self.model.model.layers:
                layer.compile(dynamic=False)
            self.losses = torch.compile(token_losses, dynamic=False)
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": schedule.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups, lr=schedule.peak_lr, betas=schedule.betas, eps=1e-8, fused=self.device.type == "cuda"
        )

    def measure(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Loss of a batch; sum and number of the losses of each of LOSSES, fp32 [LOSSES, 2]; answer tokens right and
        in all by form, fp32 [NAMES, 2].
        """
        ids = torch.from_numpy(batch.tokens.astype("int64")).to(self.device, non_blocking=True)
        kind = torch.from_numpy(batch.kinds).to(self.device, non_blocking=True)
        form = torch.from_numpy(batch.forms.astype("int64")).to(self.device, non_blocking=True)
        hidden = self.model(ids[:, :-1], self.dtype)
        loss, right = self.losses(hidden.flatten(0, 1), self.model.model.embed_tokens.weight, ids[:, 1:].flatten())
        flat = kind.flatten()
        answer, text, context = (flat == k for k in (ANSWER, TEXT, CONTEXT))
        text_weight = text.float() + self.schedule.context_weight * context.float()
        sums = torch.stack([torch.stack([(loss.detach() * of).sum(), of.sum().float()]) for of in (answer, text)])
        answer_mean = (loss * answer).sum() / answer.sum().clamp(min=1)
        text_mean = (loss * text_weight).sum() / text_weight.sum().clamp(min=1)
        counts = torch.stack([right & answer, answer], -1).view(*kind.shape, 2).sum(1).float()
        by_form = torch.zeros(len(NAMES), 2, device=self.device).index_add_(0, form, counts)
        return answer_mean + self.schedule.text_loss * text_mean, sums, by_form

    def step(self, batches: list[Batch], lr: float) -> Step | None:
        """One update over several microbatches; None, and no update, where loss or gradient is not finite."""
        total = torch.zeros((), device=self.device)
        sums = torch.zeros(len(LOSSES), 2, device=self.device)
        by_form = torch.zeros(len(NAMES), 2, device=self.device)
        for batch in batches:
            loss, parts, counts = self.measure(batch)
            (loss / len(batches)).backward()
            total += loss.detach() / len(batches)
            sums += parts
            by_form += counts
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.schedule.clip)
        loss_and_norm, told = torch.stack([total, norm]), torch.cat([sums, by_form])
        values = torch.cat([loss_and_norm, told.flatten()]).tolist()  # the only wait for the device
        finite = all(map(math.isfinite, values[:2]))
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if not finite:
            return None
        pairs = [(values[i], values[i + 1]) for i in range(2, len(values), 2)]
        return Step(values[0], values[1], pairs[: len(LOSSES)], pairs[len(LOSSES) :])


def train(
    data: Path,
    out: Path,
    *,
    minutes: float,
    shape: ModelShape | None = None,
    schedule: Schedule | None = None,
    device: str = "cuda",
    workers: int = 14,
    seed: int = 0,
    resume: Path | None = None,
    start: Path | None = None,
    compile_layers: bool = True,
    save_every: float = 120.0,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train for `minutes` (compile time included) and write a checkpoint to `out`, also every `save_every` seconds.

    Args:
        data: what `prepare` wrote.
        resume: a checkpoint of an interrupted training, to go on from at its place in the schedule of `minutes`, which
            its own count in.
        start: a checkpoint to begin this schedule with. Both hold weights (bf16) and no optimiser: the learning rate
            warms up again, and batches are others.
        save_every: seconds between checkpoints.

    Returns:
        the log, also written to out/train.json: settings, loss curve, accuracy of answer tokens by form. Where `out` is
        what was resumed or begun with, the log that was there is kept under the step that it ended at.

    Raises:
        InvalidInput: minutes that are none.
        LongreachError: no CUDA device, data or checkpoint that are not there or do not fit, no place to write to.
    """
    shape, schedule = shape or ModelShape(), schedule or Schedule()
    if not 0 < minutes < math.inf:
        raise InvalidInput(f"minutes: expected a number above 0, got {minutes:g}")
    torch.manual_seed(seed)
    if device == "cuda" and not torch.cuda.is_available():
        raise LongreachError("no CUDA device here; pass --device cpu (slow) or train on a machine with a GPU")
    if missing := [name for name in checkpoint.DATA_FILES if not (data / name).is_file()]:
        raise LongreachError(f"{data} has no {', '.join(missing)}; make it with longreach train mini --prepare {data}")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LongreachError(f"cannot write to {out}: {error.strerror}; choose another place") from error
    torch.set_float32_matmul_precision("high")
    trainer = Trainer(shape, schedule, device, compile_layers)
    before = resume or start
    done = checkpoint.Trained() if before is None else checkpoint.load(trainer.model, before)
    if before is not None and checkpoint.other_tokenizer(before, data):
        raise LongreachError(
            f"{before} was trained with another tokenizer than {data} holds: other versions of packages were prepared; "
            f"train from nothing, or prepare the versions that {before / checkpoint.CORPUS} names"
        )
    name = schedule_name(schedule)
    if resume is not None and done.schedule not in (None, name):
        raise LongreachError(f"{resume} is of the schedule {done.schedule}; go on with --schedule {done.schedule}")
    done = replace(done, schedule=name, began=done.began if start is None else done.seconds)
    if (spent := done.seconds - done.began) >= minutes * 60:
        raise LongreachError(
            f"{resume} was trained for {spent / 60:.1f} minutes of its schedule, all of the {minutes:g} requested; "
            f"give more --minutes, its own included, to go on with it"
        )
    if before is not None and (out / checkpoint.LOG).is_file() and out.resolve() == before.resolve():
        earlier = out / f"train-{done.steps}.json"  # the card needs the logs of all runs
        os.replace(out / checkpoint.LOG, earlier)
        say(f"the log up to here is kept as {earlier}")
    factory = BatchFactory(data, schedule.plain_text, workers, f"{seed}" if before is None else f"{seed}@{done.steps}")
    log: dict[str, Any] = {
        "shape": asdict(shape),
        "schedule": {"name": name, **asdict(schedule)},
        "minutes": minutes,
        "seed": seed,
        "resume": {"from": str(before), **asdict(done)} if before else None,
        **environment(trainer.device),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "curve": [],
    }
    try:
        _loop(trainer, factory, data, out, log, done, minutes * 60, save_every, workers, say)
    finally:
        factory.close()
    return log


def _loop(
    trainer: Trainer,
    factory: BatchFactory,
    data: Path,
    out: Path,
    log: dict[str, Any],
    done: checkpoint.Trained,
    budget: float,
    save_every: float,
    workers: int,
    say: Callable[[str], None],
) -> None:
    schedule = trainer.schedule
    last_save = said = time.monotonic()
    begun = said - done.seconds
    step, tokens = done.steps, done.tokens
    asked = bad = 0
    said_tokens = tokens
    starved = 0.0
    sums, counts = [(0.0, 0.0)] * len(LOSSES), [(0.0, 0.0)] * len(NAMES)  # since the last note
    while (elapsed := time.monotonic() - begun - done.began) < budget:
        fraction = elapsed / budget
        cycle = schedule.lengths(fraction)
        while factory.pending < 2 * workers + schedule.microbatches:
            length = cycle[asked % len(cycle)]
            factory.ask(length, max(1, schedule.microbatch_tokens // length))
            asked += 1
        waited = time.monotonic()
        batches = [factory.take() for _ in range(schedule.microbatches)]
        starved += time.monotonic() - waited
        lr = learning_rate(schedule, fraction, step - done.steps)
        result = trainer.step(batches, lr)
        step, first = step + 1, step == done.steps
        tokens += sum(b.kinds.size for b in batches)
        bad = 0 if result else bad + 1
        if bad > MAX_BAD_STEPS:
            raise LongreachError(f"{bad} steps in a row were not finite; lower the learning rate")
        now = time.monotonic()
        if result:
            sums, counts = added(sums, result.losses), added(counts, result.forms)
            if now - said > 10 or first:
                losses, forms = ratios(LOSSES, sums), ratios(NAMES, counts)
                log["curve"].append(
                    {
                        "step": step,
                        "seconds": round(now - begun, 2),
                        "tokens": tokens,
                        "lr": lr,
                        "lengths": [b.length for b in batches],
                        "loss": result.loss,
                        **losses,
                        "grad_norm": result.grad_norm,
                        "forms": {name: round(accuracy, 4) for name, accuracy in forms.items()},
                    }
                )
                rate = (tokens - said_tokens) / (now - said)
                say(
                    f"{now - begun:6.0f}s step {step} {tokens / 1e6:.0f}M {rate / 1e6:.2f}M/s lr {lr:.1e} "
                    f"len {max(b.length for b in batches)} "
                    + "".join(f"{name} {losses[name]:.3f} " for name in reversed(LOSSES) if name in losses)
                    + f"norm {result.grad_norm:.2f} waited {starved:.1f}s "
                    + " ".join(f"{name} {100 * accuracy:.1f}" for name, accuracy in forms.items())
                )
                said, said_tokens, starved = now, tokens, 0.0
                sums, counts = [(0.0, 0.0)] * len(LOSSES), [(0.0, 0.0)] * len(NAMES)
        if now - last_save > save_every:
            _write(trainer, data, out, log, replace(done, seconds=now - begun, steps=step, tokens=tokens))
            last_save = now
    seconds = time.monotonic() - begun
    log["steps"], log["tokens"], log["seconds"] = step, tokens, round(seconds, 2)
    _write(trainer, data, out, log, replace(done, seconds=seconds, steps=step, tokens=tokens))
    say(f"done: {step} steps, {tokens / 1e6:.1f}M tokens, {log['seconds']:.0f}s, written to {out}")


def _write(trainer: Trainer, data: Path, out: Path, log: dict[str, Any], done: checkpoint.Trained) -> None:
    try:
        checkpoint.save(trainer.model, out, data, done)
        checkpoint.replace(out / checkpoint.LOG, (json.dumps(log) + "\n").encode())
    except (OSError, SafetensorError) as error:
        raise LongreachError(f"cannot write a checkpoint to {out} ({error}); the one before is whole") from error
