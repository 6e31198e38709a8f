"""Chunks of an evaluation's prompts: what they are computed behind, and what a plain prefill changes of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from longreach import attach
from longreach.adapters.transformers import BatchReader, DependenceMeter, Precompute, Session
from longreach.errors import InvalidInput
from longreach.evals.fusion import BEHIND, FusedPrompts, Oracle, RowOrder
from longreach.evals.fusion.chunks import prefix_tokens
from longreach.evals.fusion.memory import middle
from longreach.methods.fusion import A3, PIE, Dependence
from longreach.methods.snapkv import SnapKV
from longreach.testing.tiny import BOS_ID, random_tokens, tiny_model, tiny_tokenizer

IDS = [BOS_ID, *random_tokens(1, 89, seed=4)[0].tolist()]
CHUNKS = ((7, 30), (30, 41), (41, 80))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", num_hidden_layers=4)


@pytest.fixture
def session(model: Any) -> Iterator[Session]:
    with attach(model, fuse=PIE()) as opened:
        yield opened


@pytest.mark.parametrize("behind", BEHIND)
def test_what_chunks_are_computed_behind(session: Session, behind: Any) -> None:
    prompt = FusedPrompts(session, tiny_tokenizer(), behind, 512).of(IDS, CHUNKS)
    prefix = {"alone": [], "bos": [BOS_ID], "system": IDS[:7]}[behind]
    assert list(prompt.ids) == IDS and [start for start, _ in prompt.chunks] == [7, 30, 41]
    assert all(chunk.prefix.tolist() == prefix for _, chunk in prompt.chunks)
    want = Precompute(session, prefix).compute(IDS[41:80])
    assert all(torch.equal(a, b) for a, b in zip(prompt.chunks[2].chunk.keys, want.keys, strict=True))


def test_behind_bos_takes_a_tokenizer_that_has_one() -> None:
    class Bare:
        eos_token_id = None

        def __call__(self, text: str, **options: Any) -> Any:
            return type("Encoding", (), {"input_ids": []})

    with pytest.raises(InvalidInput, match="puts no token before a text"):
        prefix_tokens(Bare(), "bos", IDS, 7)


def test_how_far_a_plain_prefill_moves_what_is_stored(session: Session) -> None:
    prompts = FusedPrompts(session, tiny_tokenizer(), "bos", 16)
    prompt = prompts.of(IDS, CHUNKS)
    got = prompts.moved(prompt)
    whole = Precompute(session).compute(IDS)  # before rotation, which changes no distance of keys in one place
    want = torch.zeros(len(IDS), dtype=torch.float64)
    assert list(middle(4)) == [1, 2]
    for layer in (1, 2):
        for kind in ("keys", "values"):
            truth = getattr(whole, kind)[layer].double()
            scale = truth.square().sum((0, 2)).mean()
            for start, chunk in prompt.chunks:
                stop = start + len(chunk.tokens)
                off = (getattr(chunk, kind)[layer].double() - truth[:, start:stop]).square().sum((0, 2))
                want[start:stop] += off / scale
    asked = slice(7, 80)  # what is not stored differs where it attends to what is
    torch.testing.assert_close(got.double()[asked], want[asked], rtol=1e-3, atol=1e-5)
    assert float(got[:7].max()) < 1e-8 and prompts.moved(prompt) is got
    assert session.prefill.name == "dense" and session.fuse == PIE() and session.evict is None


def test_reads_of_one_prompt_by_any_method(session: Session) -> None:
    prompts = FusedPrompts(session, tiny_tokenizer(), "alone", 512)
    prompt = prompts.of(IDS, CHUNKS)
    exact = BatchReader(session).read([IDS])
    _, logits, became = prompts.read(prompt, A3(1.0))
    torch.testing.assert_close(logits, exact, rtol=1e-4, atol=1e-4)
    assert (became.exact, became.recomputed, became.computed) == (0, 73, 17)
    _, by_rows, _ = prompts.read(prompt, RowOrder("a3", 1.0))  # all rows in order are all rows
    torch.testing.assert_close(by_rows, exact, rtol=1e-4, atol=1e-4)
    right, wrong = (prompts.read(prompt, fusion)[1] for fusion in (A3(0.4), RowOrder("a3", 0.4)))
    assert float((right - wrong).abs().max()) > 1e-2
    assert prompts.read(prompt, Oracle(0.2))[2].recomputed == 18
    reader, evicted, _ = prompts.read(prompt, A3(0.2), SnapKV(capacity=20))
    reader.answer(evicted, 3, ())
    assert reader.cache is not None and reader.cache.kv.slots_in_use(0) == [20]
    _, again, _ = prompts.read(prompt, A3(0.4))
    assert torch.equal(again, right) and session.evict is None
    assert 1 < session.report().fraction("prefill") < 1.1  # the prompt's own attention, and what choosing read


@pytest.mark.parametrize("behind", BEHIND)
def test_dependence_of_the_only_chunk_of_a_prompt(session: Session, behind: Any) -> None:
    """It is run behind its own first tokens, unless it is exact and needs no numbers."""
    prompts = FusedPrompts(session, tiny_tokenizer(), behind, 512, dependence=True)
    prompt = prompts.of(IDS, CHUNKS[2:])
    ((_, chunk),) = prompt.chunks
    _, _, became = prompts.read(prompt, Dependence(0.1))
    if behind == "system":
        assert chunk.dependence is None and (became.exact, became.recomputed) == (39, 0)
        return
    work = Precompute(session, chunk.prefix)
    room = len(IDS) - len(chunk.prefix) - len(chunk.tokens)
    want = DependenceMeter(work).measured(work.compute(chunk.tokens), chunk.tokens[:room].tolist()).dependence
    assert chunk.dependence is not None and want is not None and torch.equal(chunk.dependence, want)
    assert (became.exact, became.recomputed) == (0, 9) and float(want.std()) > 0


def test_chunks_get_the_dependence_that_a_prompt_needs(session: Session) -> None:
    prompt = FusedPrompts(session, tiny_tokenizer(), "system", 512, dependence=True).of(IDS, CHUNKS)
    assert [chunk.dependence is None for _, chunk in prompt.chunks] == [True, False, False]
    prompt = FusedPrompts(session, tiny_tokenizer(), "bos", 512, dependence=True).of(IDS, CHUNKS)
    work = Precompute(session, [BOS_ID])
    for number, other in enumerate(((30, 41), (7, 30), (7, 30))):
        want = DependenceMeter(work).measured(work.compute(IDS[slice(*CHUNKS[number])]), IDS[slice(*other)])
        got = prompt.chunks[number].chunk.dependence
        assert got is not None and want.dependence is not None and torch.equal(got, want.dependence)
