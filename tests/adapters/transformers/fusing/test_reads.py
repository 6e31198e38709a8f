"""Reports of fused prompts: what choosing tokens and voting read is in them, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from longreach import Quest, attach
from longreach.adapters.transformers.fusing import FusedPrompt, read, read_batch
from longreach.adapters.transformers.prompt_reader import Answer, Reader
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall
from longreach.methods.fusion import A3, PIE, A3Deep, CacheBlend
from longreach.methods.slots import Fusion
from longreach.methods.snapkv import SnapKV
from longreach.runtime import LayerReport, Report
from longreach.testing.tiny import tiny_model
from tests.adapters.transformers.fusing.test_read import LENGTHS, QUESTION, prompt_of, tokens

HEADS, VECTOR, LAYERS = 2, 16 * 4, 3  # KV heads, bytes of a key


class Attended:
    """Slots that rows saw in all KV heads, pass by pass, by layer."""

    def __init__(self, session: Any):
        self.seen = dict[int, list[int]]()
        session.on_layer = self.note

    def note(self, phase: str, call: LayerCall, outcome: Outcome) -> None:
        if phase == "prefill":
            self.seen.setdefault(call.layer, []).append(HEADS * int((call.rows.pos + 1).sum()))


def by_layer(report: Report) -> list[LayerReport]:
    return [layer for layer in report.layers if layer.phase == "prefill"]


def sees(length: int, rows: int = QUESTION) -> int:
    """Slots that the last rows of a prompt see in all KV heads."""
    return HEADS * sum(range(length - rows + 1, length + 1))


@pytest.mark.parametrize(
    "fusion, at",
    [(PIE(), 0), (A3(ratio=0.2), 1), (A3(ratio=0.2, heads="joint"), 1), (CacheBlend(ratio=0.2), 1),
     (A3Deep(ratio=0.2), 1), (A3Deep(ratio=0.2, layer=2, rounds=2), 2)],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("batch", [1, 2])
def test_what_choosing_reads_is_counted(fusion: Fusion, at: int, batch: int) -> None:
    """Keys for the question's rows, and compared values; a probe's whole pass. Dense attention's bytes are those of the
    pass that puts the prompt into the cache."""
    model = tiny_model("llama", num_hidden_layers=LAYERS)
    prompt = prompt_of(model)
    prompts = [prompt.fused, FusedPrompt.of([prompt.system, *prompt.chunks, tokens(QUESTION + 70, 4)])][:batch]
    keys = sum(sees(len(p.ids), len(p.ids) - p.question) for p in prompts)
    with attach(model, fuse=fusion, decode=Quest(k=0.5, page=4)) as session:
        attended, cache = Attended(session), session.new_cache(batch)
        read_batch(session, cache, prompts)
        report = by_layer(session.report("dense"))
        assert len(report) == LAYERS
        for layer in report:
            passes = attended.seen[layer.layer]
            key_bytes = value_bytes = sum(passes) * VECTOR
            if layer.layer == at and isinstance(fusion, (A3, A3Deep)):
                key_bytes += keys * VECTOR * (fusion.rounds if isinstance(fusion, A3Deep) else 1)
            if layer.layer == at and isinstance(fusion, CacheBlend):
                value_bytes += 2 * batch * sum(LENGTHS) * HEADS * VECTOR
            assert (layer.key_bytes, layer.value_bytes, layer.metadata_bytes) == (key_bytes, value_bytes, 0)
            assert layer.dense_bytes == 2 * VECTOR * passes[-1] and layer.steps == 1
            assert layer.method == ("dense" if layer.bytes_read == layer.dense_bytes else f"dense+{fusion.name}")
        session.report()  # quest has observed all
        session.reset_report()
        cache.empty()
        read_batch(session, cache, prompts)
        assert by_layer(session.report("dense")) == report


@pytest.mark.parametrize("fusion", [None, A3(ratio=0.2)], ids=repr)
def test_what_voting_reads_is_counted_once_the_first_token_is_decoded(fusion: Fusion | None) -> None:
    model = tiny_model("llama", num_hidden_layers=LAYERS)
    prompt = prompt_of(model)
    length = len(prompt.ids)
    for capacity in (40, length):
        with attach(model, fuse=fusion, evict=SnapKV(capacity=capacity, window=5)) as session:
            reader = Reader(session, chunk=16)
            logits = reader.read(prompt.ids) if fusion is None else read(session, reader.cache, prompt.fused)[0]
            before = by_layer(session.report())
            list(reader.decode(logits, 3, Answer()))
            votes = 0 if capacity == length else sees(length, 5 if fusion is None else QUESTION) * VECTOR
            for old, new in zip(before, by_layer(session.report()), strict=True):
                assert (new.key_bytes - old.key_bytes, new.value_bytes - old.value_bytes) == (votes, 0)
                assert new.dense_bytes == old.dense_bytes and ("snapkv" in new.method) == bool(votes)


def test_a_pass_that_fails_after_its_probe_does_not_count() -> None:
    model = tiny_model("llama", num_hidden_layers=LAYERS)
    prompt = prompt_of(model).fused
    with attach(model, fuse=A3Deep(ratio=0.2)) as session:
        cache = session.new_cache(1)
        read(session, cache, prompt)
        once = session.report()
        cache.empty()
        attended = Attended(session)

        def failing(phase: str, call: LayerCall, outcome: Outcome) -> None:
            attended.note(phase, call, outcome)
            if len(attended.seen.get(1, [])) == 1 and call.layer == 1:
                raise RuntimeError("after the probe")

        session.on_layer = failing
        with pytest.raises(RuntimeError, match="after the probe"):
            read(session, cache, prompt)
        assert session.report() == once
        session.on_layer = None
        read(session, cache, prompt)
        twice = session.report()
        assert [layer.key_bytes for layer in twice.layers] == [2 * layer.key_bytes for layer in once.layers]
