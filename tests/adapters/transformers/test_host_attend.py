"""The choice of who attends to keys in host memory, with the captured steps' times replaced by given ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from numba.core.errors import TypingError

from longreach import CacheConfig, attach, generate
from longreach.adapters.transformers.attach import Session
from longreach.adapters.transformers.hf_cache import LongreachCache
from longreach.adapters.transformers.loop import host_attend
from longreach.adapters.transformers.loop.decoder import Decoder
from longreach.adapters.transformers.loop.host_attend import LEAST, NEEDED
from longreach.adapters.transformers.loop.run import DecodeRun, decoder_for
from longreach.adapters.transformers.loop.sampling import Ends
from longreach.cache import HostAttend
from longreach.errors import CapacityError, HostCallFailed, OutOfMemory, Unsupported
from longreach.methods.quest import Quest
from longreach.testing.tiny import tiny_model
from tests.adapters.transformers.reference import prompt

QUEST = Quest(k=0.2, page=4, dense_layers=(0,))
Times = dict[str, float | BaseException]


def reason(*, impl: str = "auto", capture: Any = "full") -> str | None:
    session: Any = SimpleNamespace(impl=impl)
    return host_attend._link_only(session, capture)


def test_why_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason() is None and reason(capture="piecewise") is None
    assert reason(capture=None) == "not measured, as the step is not captured"
    assert reason(impl="triton") == "not measured, as impl='triton' was asked for"
    monkeypatch.setattr(host_attend, "has_numba", lambda: False)
    assert reason() == "not measured, as Numba is not installed"


def test_on_a_cpu_there_is_no_choice() -> None:
    with attach(tiny_model("llama"), decode="quest", cache=CacheConfig(host=True)) as session:
        generate(session, prompt(), max_new_tokens=LEAST)
        memory = session.report().memory
        assert not session.static_caches[1].attends
    assert memory is not None and "link" not in str(memory)


@pytest.fixture
def session() -> Iterator[Session]:
    with attach(tiny_model("llama"), decode=QUEST, cache=CacheConfig(host=True)) as made:
        yield made


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[Times], list[str]]:
    """Measure as on a GPU, by uncaptured steps: their times, or errors, by way. Returns the ways measured."""

    def replaced(times: Times) -> list[str]:
        ways: list[str] = []

        def milliseconds(decoder: Decoder, tokens: torch.Tensor) -> float:
            ways.append(decoder.cache.kv.attend.by)
            assert list(decoder.cache.decoders.values()) == [decoder], "the step before it was dropped"
            with decoder.run(Ends((), 0), NEEDED):
                decoder.take(tokens)
                found = times[ways[-1]]
                for _ in range(NEEDED if isinstance(found, float | HostCallFailed) else 0):
                    decoder.step(capture=False)
                if isinstance(found, BaseException):
                    decoder.cache.kv.calls._status[0] = 2
                    raise found
            return found

        monkeypatch.setattr(host_attend, "_milliseconds", milliseconds)
        monkeypatch.setattr(host_attend, "_to_be_chosen", lambda kv: kv.config.host_attend == "auto")
        monkeypatch.setattr(host_attend, "_link_only", lambda session, capture: None)
        return ways

    return replaced


def by_cpu(session: Session) -> bool:
    words = (re.split(r"[,+ ]+", x.impl) for x in session.report().layers if x.phase == "decode")
    return any("cpu" in each for each in words)


def test_the_faster_way_is_used_and_its_measurement_leaves_no_trace(
    session: Session, measured: Callable[[Times], list[str]]
) -> None:
    plain = generate(session, prompt(), max_new_tokens=LEAST)
    before = [(x.rows, x.bytes_read) for x in session.report().layers]
    session.reset_report()
    session.static_caches.clear()
    ways = measured({"link": 2.0, "cpu": 1.0})
    got = generate(session, prompt(), max_new_tokens=LEAST)
    report = session.report()
    assert torch.equal(got.sequences, plain.sequences) and ways == ["link", "cpu"]
    assert [(x.rows, x.bytes_read) for x in report.layers] == before
    assert report.memory is not None and report.memory.cpu_layers == (1,) and report.memory.calls_bytes
    assert report.memory is not None and report.memory.attend == HostAttend("cpu", 2.0, 1.0) and by_cpu(session)
    assert session.static_caches[1].kv.attend == HostAttend(), "the choice is for the answer alone"
    session.reset_report()
    short = generate(session, prompt(), max_new_tokens=12)
    assert short.setup_seconds == 0 < got.setup_seconds
    assert ways == ["link", "cpu"] and by_cpu(session), "a choice serves shorter answers too"
    session.reset_report()
    cache, longer = session.static_caches.pop(1), torch.cat([short.sequences, prompt()], 1)
    session.model.generate(longer, max_new_tokens=8, past_key_values=cache, do_sample=False)
    assert not by_cpu(session)


def test_the_link_stays_where_it_is_faster_or_an_answer_is_short(
    session: Session, measured: Callable[[Times], list[str]]
) -> None:
    ways = measured({"link": 1.0, "cpu": 2.0})
    generate(session, prompt(), max_new_tokens=LEAST - 1)
    memory = session.report().memory
    assert not ways and memory is not None
    assert memory.attend.why == f"not measured for answers below {LEAST} tokens, and max_new_tokens is {LEAST - 1}"
    generate(session, prompt(), max_new_tokens=LEAST)
    assert ways == ["link", "cpu"] and not by_cpu(session)


def test_a_choice_is_for_a_method_a_capture_and_similar_lengths(
    session: Session, measured: Callable[[Times], list[str]]
) -> None:
    ways = measured({"link": 2.0, "cpu": 1.0})
    make = session.new_cache

    def chosen(cache: LongreachCache, capture: Any) -> HostAttend:
        def step() -> Decoder:
            return decoder_for(session, cache, LEAST, sampled=False, compile="none", capture=None)

        with host_attend.host_attend(session, cache, LEAST, torch.tensor([3]), step, capture=capture):
            return cache.kv.attend

    cache = make(1)
    with torch.no_grad():
        session.model(input_ids=prompt(70), past_key_values=cache)
        for capture, count in (("full", 2), ("full", 2), ("piecewise", 4)):
            assert chosen(cache, capture).by == "cpu" and len(ways) == count
        session.model(input_ids=prompt(70), past_key_values=cache)
        assert chosen(cache, "full").by == "cpu" and len(ways) == 6, "twice the length"
    assert cache.kv.attend == HostAttend()


def test_a_stored_choice_is_not_used_where_only_the_link_may_be() -> None:
    cache: Any = SimpleNamespace(
        kv=SimpleNamespace(
            config=CacheConfig(host=True), device=torch.device("cuda"), in_host={1}, attend=HostAttend(), lengths=[9]
        ),
        attends={(QUEST, None, 4): HostAttend("cpu", 2.0, 1.0), (QUEST, "full", 4): HostAttend("cpu", 2.0, 1.0)},
    )
    step: Any = None
    for impl, capture in (("auto", None), ("reference", "full")):
        session: Any = SimpleNamespace(decode=QUEST, impl=impl)
        with host_attend.host_attend(session, cache, 100, torch.tensor([3]), step, capture=capture):  # type: ignore[arg-type]
            assert cache.kv.attend.by == "link"
        assert cache.kv.attend == HostAttend()


@pytest.mark.parametrize(
    "error",
    [
        HostCallFailed("a compiled kernel failed"), CapacityError("could not be pinned"), OSError("sem_init failed"),
        RuntimeError("can't start new thread"), OutOfMemory("no room for a graph"),
        ImportError("Numba needs NumPy 2.2 or less"), TypingError("cannot determine the type"), ValueError("no cache"),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_if_the_cpu_fails_the_link_serves_with_a_warning(
    error: BaseException, session: Session, measured: Callable[[Times], list[str]]
) -> None:
    plain = generate(session, prompt(), max_new_tokens=LEAST).sequences
    session.static_caches.clear()
    session.reset_report()
    measured({"link": 2.0, "cpu": error})
    why = f"{type(error).__name__}: {error}"
    with pytest.warns(UserWarning, match=re.escape(f"read over the link; the CPU cannot: {why}")):
        got = generate(session, prompt(), max_new_tokens=LEAST)
    memory = session.report().memory
    assert torch.equal(got.sequences, plain) and not by_cpu(session)
    assert memory is not None and memory.attend.why == f"the CPU cannot: {why}"
    assert session.static_caches[1].kv.calls._status[0] == 0


@pytest.mark.parametrize(("way", "error"), [("cpu", KeyboardInterrupt()), ("link", ImportError("no Triton"))])
def test_ctrl_c_and_errors_of_the_link_are_raised(
    way: str, error: BaseException, session: Session, measured: Callable[[Times], list[str]]
) -> None:
    measured({"link": 2.0, "cpu": 1.0, way: error})
    cache = session.new_cache(1)
    with pytest.raises(type(error)):
        generate(session, prompt(), max_new_tokens=LEAST, past_key_values=cache)
    assert cache.kv.attend == HostAttend() and not cache.attends and not cache.columns


def test_after_a_failure_in_an_answer_the_next_one_measures_again(
    session: Session, measured: Callable[[Times], list[str]]
) -> None:
    ways = measured({"link": 2.0, "cpu": 1.0})
    cache = session.new_cache(1)

    def answer(new: int, **given: Any) -> torch.Tensor:
        cache.empty()
        return generate(session, prompt(), max_new_tokens=new, past_key_values=cache, **given).sequences

    want = answer(LEAST)
    broken = SimpleNamespace(put=lambda tokens: cache.kv.calls._status.fill(2), end=lambda: None)
    with pytest.raises(HostCallFailed):
        answer(LEAST, streamer=broken)
    assert not cache.attends and not cache.columns and ways == ["link", "cpu"]
    session.reset_report()
    answer(12)
    assert not by_cpu(session), "a short answer is not measured"
    assert torch.equal(answer(LEAST), want) and by_cpu(session) and ways == ["link", "cpu"] * 2


def test_the_first_token_comes_before_the_measurement(session: Session, measured: Callable[[Times], list[str]]) -> None:
    ways = measured({"link": 2.0, "cpu": 1.0})
    cache, logits = read(session)
    run = DecodeRun(session, LEAST, Ends((), 0))
    with closing(run.tokens(cache, logits)) as tokens:
        next(tokens)
        assert not ways and run.setup_seconds == 0
        next(tokens)
        assert ways == ["link", "cpu"] and run.setup_seconds > 0


def test_what_the_cpu_does_not_take_needs_no_warning_and_the_links_errors_are_raised(
    session: Session, measured: Callable[[Times], list[str]], recwarn: pytest.WarningsRecorder
) -> None:
    measured({"link": 2.0, "cpu": Unsupported("fp64")})
    generate(session, prompt(), max_new_tokens=LEAST)
    assert not [w for w in recwarn if "the CPU cannot" in str(w.message)]
    session.static_caches.clear()
    measured({"link": CapacityError("full"), "cpu": 1.0})
    with pytest.raises(CapacityError, match="full"):
        generate(session, prompt(), max_new_tokens=LEAST)


def test_a_cache_that_cannot_be_rolled_back_ends_the_answer(
    session: Session, measured: Callable[[Times], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its columns are not those of the answer, so the link cannot go on."""
    measured({"link": 2.0, "cpu": OSError("no thread")})
    plain = LongreachCache._roll_back

    def broken(cache: LongreachCache, *given: Any) -> None:
        if cache.kv.attend.by == "cpu":
            raise Unsupported("state cannot be cut")
        plain(cache, *given)

    monkeypatch.setattr(LongreachCache, "_roll_back", broken)
    with pytest.warns(UserWarning, match="no thread"), pytest.raises(Unsupported, match="state cannot be cut"):
        generate(session, prompt(), max_new_tokens=LEAST)


def test_measured_steps_call_no_hook(session: Session, measured: Callable[[Times], list[str]]) -> None:
    measured({"link": 2.0, "cpu": 1.0})
    called: list[str] = []
    session.on_layer = lambda phase, *_: called.append(phase)
    generate(session, prompt(), max_new_tokens=LEAST, eos_token_id=())
    assert called.count("decode") == (LEAST - 1) * len(session.static_caches[1].kv.memory)
    assert session.on_layer is not None


# errors of the CPU in answers that end early


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch, session: Session) -> Session:
    """A session whose answers are attended to by the CPU."""
    monkeypatch.setattr(host_attend, "_to_be_chosen", lambda kv: True)
    monkeypatch.setattr(host_attend, "_chosen", lambda *given: HostAttend("cpu"))
    return session


def read(session: Session) -> tuple[LongreachCache, torch.Tensor]:
    cache = session.new_cache(1)
    with torch.no_grad():
        return cache, session.model(input_ids=prompt(), past_key_values=cache).logits[:, -1]


def test_an_error_is_raised_by_an_answer_that_is_closed_early(attended: Session) -> None:
    cache, logits = read(attended)
    with (
        cache.rollback(),
        pytest.raises(HostCallFailed, match="a compiled kernel failed"),
        closing(DecodeRun(attended, 12, Ends((), 0)).tokens(cache, logits)) as tokens,
    ):
        for number, _ in enumerate(tokens):
            if number == 3:
                cache.kv.calls._status[0] = 2  # what a program writes while a later step is under way
                break
    assert len(list(DecodeRun(attended, 4, Ends((), 0)).tokens(cache, logits))) == 4


def test_ctrl_c_drops_an_error_with_its_answer(attended: Session) -> None:
    class Stop:
        seen = 0

        def put(self, tokens: torch.Tensor) -> None:
            self.seen += 1
            if self.seen == 4:
                cache.kv.calls._status[0] = 2
                raise KeyboardInterrupt

        def end(self) -> None:
            pass

    cache = attended.new_cache(1)
    with pytest.raises(KeyboardInterrupt):
        generate(attended, prompt(), max_new_tokens=12, past_key_values=cache, streamer=Stop())
    assert cache.kv.calls._status[0] == 0
    generate(attended, prompt(), max_new_tokens=4, past_key_values=cache)


def test_an_error_of_before_is_not_blamed_on_the_next_answer(attended: Session) -> None:
    cache = attended.new_cache(1)
    cache.kv.calls._status[0] = 1
    generate(attended, prompt(), max_new_tokens=4, past_key_values=cache)
