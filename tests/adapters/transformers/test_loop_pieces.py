"""A decode step captured in pieces: order, buffers and errors of the pieces, and the tokens and counts of a model."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from longreach import CacheConfig, OracleTopK, Quest, StreamingLLM, attach, generate
from longreach.adapters.transformers.loop import decoder as decoding
from longreach.adapters.transformers.loop import run as running
from longreach.adapters.transformers.loop.pieces import Pieces
from longreach.adapters.transformers.loop.run import capture_for
from longreach.errors import ConcurrentUse, InvalidInput, Unsupported
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall
from longreach.methods.dense import Dense
from longreach.methods.registry import names
from longreach.runtime import Report
from longreach.testing.tiny import tiny_model
from tests.adapters.transformers.fake_graph import FakeGraph
from tests.adapters.transformers.reference import model_of, padded_batch
from tests.methods.cases import CASES
from tests.methods.planned import planned, tiny, write_plans

STEPS = 10


# the pieces alone


def test_pieces_run_in_the_recorded_order_and_keep_their_buffers() -> None:
    log: list[str] = []
    x, total = torch.tensor([1.0, 2.0]), torch.zeros(2)
    graphs: list[FakeGraph] = []
    pieces = Pieces(_noted(graphs))

    def attend(name: str, y: Tensor) -> Callable[[], Tensor]:
        def compute() -> Tensor:
            log.append(f"{name}: {y.tolist()}")
            return (y + 0.1).double()

        return compute

    with pieces.recording():
        y = x * 2
        a = pieces.cut(attend("first", y), torch.float32)
        z = a + y
        b = pieces.cut(attend("second", z), torch.bfloat16)
        pieces.host(lambda: log.append("counted"))
        total += b.float()
    assert a.dtype == torch.float32 and b.dtype == torch.bfloat16 and pieces.graphs == len(graphs) == 4

    def expected(x: Tensor) -> Tensor:
        y = x * 2
        return ((y + 0.1).float() + y + 0.1).bfloat16().float()

    first = expected(x)
    assert torch.equal(total, first), "recording is a step too"
    where = (a.data_ptr(), b.data_ptr())
    x.copy_(torch.tensor([5.0, 7.0]))
    pieces.replay()
    assert torch.equal(total, first + expected(x)) and (a.data_ptr(), b.data_ptr()) == where
    assert [line.partition(":")[0] for line in log] == ["first", "second", "counted"] * 2
    assert log[3] == "first: [10.0, 14.0]", "host work reads this step's tensors"
    assert [g.replays for g in graphs] == [2] * 4


@pytest.mark.parametrize("where", ["in a graph", "on the host", "at the end of a graph"])
def test_an_error_while_recording_discards_all_graphs(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[FakeGraph] = []
    pieces, x = Pieces(_noted(graphs)), torch.ones(2)

    def compute() -> Tensor:
        if where == "on the host":
            raise RuntimeError("stop")
        return x

    with pytest.raises(RuntimeError, match="stop"), pieces.recording():
        pieces.cut(lambda: x, torch.float32)
        if where == "at the end of a graph":
            monkeypatch.setattr(graphs[-1], "end", _failing(graphs[-1].end))
        pieces.cut(compute, torch.float32)
        if where == "in a graph":
            raise RuntimeError("stop")
    assert pieces.failed_in_graph == (where != "on the host")
    assert pieces.graphs == 0 and {g.state for g in graphs} == {"reset"}
    pieces.replay()  # nothing is left to run
    assert bool((x + 1 == 2).all()), "no recorder is left behind"


def test_no_garbage_is_collected_while_a_step_is_recorded() -> None:
    """To free an old CUDA graph invalidates a capture."""
    seen: list[bool] = []
    pieces = Pieces(_noted([]))
    with pytest.raises(RuntimeError, match="stop"), pieces.recording():
        seen.append(gc.isenabled())
        raise RuntimeError("stop")
    assert seen == [False] and gc.isenabled()
    gc.disable()
    try:
        with pieces.recording():
            pass
        assert not gc.isenabled(), "what the caller has turned off stays off"
    finally:
        gc.enable()


# how a step is captured


@pytest.mark.parametrize(
    ("graph", "declared", "hooked", "captured", "why"),
    [
        (None, "full", False, "full", None),
        (True, "full", False, "full", None),
        (None, "piecewise", False, "piecewise", "works on the host between layers"),
        (True, "piecewise", False, "piecewise", "works on the host between layers"),
        (None, "full", True, "piecewise", "session.on_layer is set"),
        ("piecewise", "full", False, "piecewise", "graph='piecewise'"),
        (False, "piecewise", True, None, "graph=False"),
    ],
)
def test_how_a_step_is_captured(graph: Any, declared: str, hooked: bool, captured: str | None, why: str | None) -> None:
    session: Any = SimpleNamespace(
        model=SimpleNamespace(device=torch.device("cuda")), on_layer=print if hooked else None,
        decode=SimpleNamespace(capture=declared, name="some method"), facts=SimpleNamespace(hybrid=False),
    )  # fmt: skip
    how, reason = capture_for(session, graph)
    assert how == captured and (reason is None if why is None else why in str(reason))
    session.model.device = torch.device("cpu")
    if graph in (True, "piecewise"):
        with pytest.raises(Unsupported, match=f"graph={graph!r}: the model is on the cpu, which has no CUDA graphs"):
            capture_for(session, graph)
    else:
        assert capture_for(session, graph)[0] is None


# a model, on fake graphs


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[FakeGraph]:
    """Steps are captured in pieces on the CPU, unless graph=False; the graphs that were recorded."""
    made: list[FakeGraph] = []

    def how(session: Any, graph: Any) -> Any:
        return (None, "graph=False") if graph is False else ("piecewise", "as asked")

    monkeypatch.setattr(decoding, "cuda_graphs", lambda device: _noted(made))
    monkeypatch.setattr(running, "capture_for", how)
    return made


@pytest.fixture(scope="module")
def plans_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plans(tmp_path_factory.mktemp("plans"))


@pytest.mark.parametrize("name", names("decode"))
def test_pieces_make_and_count_what_uncaptured_steps_do(
    name: str, graphs: list[FakeGraph], plans_of_tests: Path
) -> None:
    model, (tokens, mask) = tiny(), padded_batch()
    layers = model.config.num_hidden_layers
    with planned(plans_of_tests), attach(model, decode=CASES[name].default) as session:
        made, reports = [], []
        for graph in (False, None):
            session.reset_report()
            made.append(generate(session, tokens, mask, max_new_tokens=STEPS, graph=graph, compile="none"))
            reports.append(session.report())
    assert [x.captured for x in made] == [None, "piecewise"] and made[1].not_captured_reason == "as asked"
    assert torch.equal(made[0].sequences, made[1].sequences)
    assert reports[0] == reports[1]
    assert len(graphs) == layers + 2, "one before each attention, one after the last, one that advances the step"


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "qwen3_moe"])
def test_sliding_windows_sinks_and_experts(family: str, graphs: list[FakeGraph]) -> None:
    tokens, mask = padded_batch()
    with attach(model_of(family), cache=CacheConfig("paged", page=8)) as session:
        plain = generate(session, tokens, mask, max_new_tokens=STEPS, graph=False)
        got = generate(session, tokens, mask, max_new_tokens=STEPS, compile="none")
    assert got.captured == "piecewise" and torch.equal(got.sequences, plain.sequences)


def test_pieces_read_keys_in_host_memory(graphs: list[FakeGraph]) -> None:
    tokens, mask = padded_batch()
    decode, made = Quest(k=8, page=4, dense_layers=(0,)), []
    for config in (CacheConfig(), CacheConfig(host=True)):
        with attach(tiny(), decode=decode, cache=config) as session:
            made += [generate(session, tokens, mask, max_new_tokens=STEPS, compile="none") for _ in range(2)]
    assert all(x.captured == "piecewise" and torch.equal(x.sequences, made[0].sequences) for x in made)


def test_pieces_serve_later_calls_and_answers_that_end(graphs: list[FakeGraph]) -> None:
    tokens, mask = padded_batch()
    with attach(model_of("llama")) as session:
        want = generate(session, tokens, mask, max_new_tokens=STEPS, graph=False)
        eos = int(want.tokens[0, 5])
        ended = generate(session, tokens, mask, max_new_tokens=STEPS, graph=False, eos_token_id=eos)
        session.reset_report()
        first = generate(session, tokens, mask, max_new_tokens=STEPS, compile="none", eos_token_id=eos)
        report, recorded = session.report(), len(graphs)
        again = generate(session, tokens, mask, max_new_tokens=STEPS, compile="none")
        session.reset_report()
        generate(session, tokens, mask, max_new_tokens=STEPS, graph=False, eos_token_id=eos)
        assert session.report() == report
        unasked = generate(session, tokens, mask, max_new_tokens=STEPS, graph=False, compile="none")
    assert torch.equal(first.sequences, ended.sequences) and torch.equal(again.sequences, want.sequences)
    assert again.setup_seconds == 0 and len(graphs) == recorded, "recorded once"
    assert unasked.captured is None


def test_sampled_steps_in_pieces(graphs: list[FakeGraph]) -> None:
    tokens, mask = padded_batch()
    made = []
    for graph in (False, None):
        torch.manual_seed(3)
        made.append(
            generate(model_of("qwen3"), tokens, mask, max_new_tokens=STEPS, do_sample=True, graph=graph, compile="none")
        )
    assert made[1].captured == "piecewise" and torch.equal(made[0].sequences, made[1].sequences)


@pytest.mark.parametrize("graph", [False, None], ids=["eager", "piecewise"])
def test_a_hook_may_report_and_gets_whole_passes(graphs: list[FakeGraph], graph: bool | None) -> None:
    ids, reports = torch.arange(3, 23)[None], list[Report]()
    decode = Quest(k=8, page=4, dense_layers=())
    with attach(tiny_model("llama"), decode=decode) as session:
        layers = session.model.config.num_hidden_layers
        generate(session, ids, max_new_tokens=6, graph=graph, compile="none")
        plain = session.report()
        session.reset_report()
        session.on_layer = lambda *_: reports.append(session.report())
        generate(session, ids, max_new_tokens=6, graph=graph, compile="none")
        assert session.report() == plain
        whole = [[x.steps for x in report.layers if x.phase == "decode"] for report in reports]
        assert whole == [[] for _ in range(2 * layers)] + [[n] * layers for n in range(1, 5) for _ in range(layers)]


def test_a_hook_sees_every_layer_of_every_step(graphs: list[FakeGraph]) -> None:
    model, ids = tiny_model("llama"), torch.arange(3, 23)[None]
    layers = model.config.num_hidden_layers
    seen: list[tuple[str, int, int, Tensor]] = []

    def observe(phase: str, call: LayerCall, outcome: Outcome) -> None:
        if phase == "decode":
            seen.append((phase, call.layer, int(call.rows.pos), outcome.partial.out.clone()))

    with attach(model) as session:
        found = []
        for graph in (False, None):
            session.on_layer = observe
            got = generate(session, ids, max_new_tokens=9, graph=graph, compile="none")
            found.append(list(seen))
            seen.clear()
        session.on_layer = None
        generate(session, ids, max_new_tokens=9, compile="none")
        assert not seen and got.captured == "piecewise"
        session.on_layer = observe
        generate(session, ids, max_new_tokens=9, compile="none")
        assert len(seen) == len(found[0])
    want = [("decode", layer, 20 + step) for step in range(8) for layer in range(layers)]
    assert [x[:3] for x in found[0]] == [x[:3] for x in found[1]] == want
    for one, other in zip(found[0], found[1], strict=True):
        assert torch.equal(one[3], other[3])


# errors


class Failing(Dense):
    """Dense attention that raises when it is called for the `at`-th time in decode steps."""

    at, calls, error = -1, 0, RuntimeError("the method failed")

    def run(self, call: LayerCall, state: Any) -> Outcome:
        if call.phase == "decode":
            Failing.calls += 1
            if Failing.calls == Failing.at:
                raise Failing.error
        return super().run(call, state)


@pytest.mark.covering
@pytest.mark.parametrize("step", ["recorded", "replayed"])
@pytest.mark.parametrize("error", [RuntimeError("the method failed"), InvalidInput("bad option"), KeyboardInterrupt()])
def test_host_work_that_fails_leaves_session_and_cache_as_they_were(
    step: str, error: BaseException, graphs: list[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = tiny_model("llama"), torch.arange(3, 23)[None]
    layers = model.config.num_hidden_layers
    for name, value in {"calls": 0, "at": -1, "error": error}.items():
        monkeypatch.setattr(Failing, name, value)
    with attach(model, decode=Failing()) as session:
        cache = session.new_cache(1)
        begun = generate(session, ids, max_new_tokens=3, graph=False, past_key_values=cache)
        want = generate(session, ids, max_new_tokens=12, graph=False)
        session.reset_report()
        whole = decoding.WARM + (0 if step == "recorded" else 2)  # steps before the one that fails in layer 1
        Failing.calls, Failing.at = 0, layers * whole + 2
        with pytest.raises(type(error), match=str(error) or None) as raised:
            generate(session, begun.sequences, max_new_tokens=9, compile="none", past_key_values=cache)
        assert type(raised.value) is type(error), "it is the method that failed, not its capture"
        assert cache.columns == ids.shape[1] + 2 == cache.kv.lengths[0]
        counted = [(r.steps, r.rows) for r in session.report().layers if r.phase == "decode"]
        assert counted == [(whole, whole)] * layers, "the failed step is not counted"
        if step == "recorded":
            assert {g.state for g in graphs} == {"reset"}
        Failing.at = -1
        got = generate(session, begun.sequences, max_new_tokens=9, compile="none", past_key_values=cache)
    assert got.captured == "piecewise" and torch.equal(got.sequences, want.sequences)


def test_a_layer_that_reads_on_the_host_cannot_be_captured(
    graphs: list[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = tiny_model("llama"), torch.arange(3, 23)[None]
    mlp = model.model.layers[1].mlp
    plain = mlp.forward

    def forward(x: Tensor) -> Tensor:
        if graphs and graphs[-1].state == "recording":
            raise RuntimeError("operation not permitted when stream is capturing")
        return plain(x)

    with attach(model, decode=StreamingLLM(2, 9)) as session:
        want = generate(session, ids, max_new_tokens=9, graph=False)
        with monkeypatch.context() as patch:
            patch.setattr(mlp, "forward", forward)
            with pytest.raises(
                Unsupported, match=r"cannot be captured in a CUDA graph: operation not.*use graph=False"
            ):
                generate(session, ids, max_new_tokens=9, compile="none")
            assert {g.state for g in graphs} == {"reset"}
            uncaptured = generate(session, ids, max_new_tokens=9, graph=False)
        got = generate(session, ids, max_new_tokens=9, compile="none")
    assert torch.equal(uncaptured.sequences, want.sequences) and torch.equal(got.sequences, want.sequences)


def test_a_hook_cannot_call_the_model(graphs: list[FakeGraph]) -> None:
    model, ids = tiny_model("llama"), torch.arange(3, 23)[None]
    with attach(model) as session:
        generate(session, ids, max_new_tokens=9, compile="none")
        steps: list[int] = []

        def observe(phase: str, call: LayerCall, outcome: Outcome) -> None:
            if phase == "decode":
                steps.append(call.layer)
                session.model(input_ids=ids)

        session.on_layer = observe
        with pytest.raises(ConcurrentUse, match="two forward passes at once"):
            generate(session, ids, max_new_tokens=9, compile="none")
        assert steps == [0]


# on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="real graphs need a GPU; fake ones are tested above")
class TestOnAGpu:
    @pytest.mark.parametrize("name", names("decode"))
    @pytest.mark.parametrize("batch", [1, 3])
    def test_same_tokens_and_counts_as_uncaptured_and_full(self, name: str, batch: int, plans_of_tests: Path) -> None:
        tokens, mask = (x[:batch].cuda() for x in padded_batch())
        options: dict[str, Any] = {"max_new_tokens": STEPS, "eos_token_id": (), "compile": "none"}
        with planned(plans_of_tests), attach(tiny().cuda(), decode=CASES[name].default) as session:
            made, reports = [], []
            for graph in (False, "piecewise", None):
                session.reset_report()
                made.append(generate(session, tokens, mask, graph=graph, **options))
                reports.append(session.report().fraction("decode"))
            again = generate(session, tokens, mask, graph="piecewise", **options)
            fused = generate(session, tokens, mask, graph="piecewise", **(options | {"compile": "compile"}))
            declared = session.decode.capture
        assert [x.captured for x in made] == [None, "piecewise", declared] and again.setup_seconds == 0
        assert all(torch.equal(x.sequences, made[0].sequences) for x in (*made[1:], again, fused))
        assert reports[0] == reports[1] == reports[2]

    @pytest.mark.parametrize("cache", [CacheConfig(), CacheConfig("paged", page=16)], ids=["contiguous", "paged"])
    def test_sampled_tokens(self, cache: CacheConfig) -> None:
        tokens, mask = (x.cuda() for x in padded_batch())
        made = []
        with attach(tiny_model("qwen3").cuda(), cache=cache) as session:
            for graph in (False, "piecewise", None):
                draw = torch.Generator("cuda").manual_seed(3)
                made.append(
                    generate(
                        session, tokens, mask, max_new_tokens=STEPS, do_sample=True, generator=draw, graph=graph,
                        eos_token_id=(),
                    )
                )  # fmt: skip
        assert [x.captured for x in made] == [None, "piecewise", "full"]
        assert all(torch.equal(x.sequences, made[0].sequences) for x in made)

    @pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "qwen3_moe"])
    def test_sliding_windows_sinks_and_experts(self, family: str) -> None:
        tokens, mask = (x.cuda() for x in padded_batch())
        with attach(tiny_model(family).cuda()) as session:
            plain = generate(session, tokens, mask, max_new_tokens=STEPS, graph=False)
            got = generate(session, tokens, mask, max_new_tokens=STEPS, graph="piecewise")
        assert got.captured == "piecewise" and torch.equal(got.sequences, plain.sequences)

    def test_the_oracle_and_hooks_run_in_pieces_unasked(self) -> None:
        model, ids = tiny_model("llama").cuda(), torch.arange(3, 43, device="cuda")[None]
        layers, seen = model.config.num_hidden_layers, list[tuple[int, int]]()
        with attach(model, decode=OracleTopK(0.3)) as session:
            plain = generate(session, ids, max_new_tokens=STEPS, graph=False)
            got = generate(session, ids, max_new_tokens=STEPS)
        assert got.captured == "piecewise" and "oracle_top_k works on the host" in str(got.not_captured_reason)
        assert torch.equal(got.sequences, plain.sequences)

        def observe(phase: str, call: LayerCall, outcome: Outcome) -> None:
            if phase == "decode":
                seen.append((call.layer, int(call.rows.pos)))  # a read on the host, allowed between graphs

        with attach(model) as session:
            full = generate(session, ids, max_new_tokens=9, eos_token_id=())
            session.on_layer = observe
            hooked = generate(session, ids, max_new_tokens=9, eos_token_id=())
        assert (full.captured, hooked.captured) == ("full", "piecewise")
        assert torch.equal(full.sequences, hooked.sequences)
        assert seen == [(layer, 40 + step) for step in range(8) for layer in range(layers)]

    def test_an_error_in_a_graph_or_on_the_host_leaves_the_session_usable(self, monkeypatch: Any) -> None:
        model, ids = tiny_model("llama").cuda(), torch.arange(3, 43, device="cuda")[None]
        mlp, calls = model.model.layers[1].mlp, [0]
        plain = mlp.forward

        def forward(x: Tensor) -> Tensor:
            return plain(x) if float(x.abs().sum()) >= 0 else x  # a read on the host

        def observe(*args: Any) -> None:
            calls[0] += 1
            if calls[0] == 20:  # of 2 layers: in the ninth step, replayed by then
                raise KeyboardInterrupt

        with attach(model) as session:
            want = generate(session, ids, max_new_tokens=STEPS, graph=False)
            for _ in range(2):
                with monkeypatch.context() as patch:
                    patch.setattr(mlp, "forward", forward)
                    with pytest.raises(Unsupported, match="cannot be captured in a CUDA graph"):
                        generate(session, ids, max_new_tokens=STEPS, graph="piecewise", compile="none")
                got = generate(session, ids, max_new_tokens=STEPS, graph="piecewise", compile="none")
                assert torch.equal(got.sequences, want.sequences)
                session.static_caches.clear()  # its recorded step too
            session.on_layer = observe
            with pytest.raises(KeyboardInterrupt):
                generate(session, ids, max_new_tokens=STEPS)
            session.on_layer = None
            got = generate(session, ids, max_new_tokens=STEPS, graph="piecewise")
            assert torch.equal(got.sequences, want.sequences)
        assert torch.isfinite(torch.rand(8, device="cuda")).all(), "the generator is not left in capture"

    @pytest.mark.parametrize("graph", ["piecewise", None])
    def test_old_graphs_among_the_garbage_do_not_disturb_a_capture(self, graph: str | None) -> None:
        model, ids = tiny_model("llama").cuda(), torch.arange(3, 43, device="cuda")[None]
        options: dict[str, Any] = {"max_new_tokens": 9, "compile": "none", "graph": graph}
        with attach(model) as session:
            want = generate(session, ids, **options).sequences
            thresholds = gc.get_threshold()
            session.static_caches.clear()  # caches and their captured steps refer to each other, so they are garbage
            gc.set_threshold(1, 1, 1)  # as soon as a capture allocates anything
            try:
                assert torch.equal(generate(session, ids, **options).sequences, want)
            finally:
                gc.set_threshold(*thresholds)

    def test_recorded_memory_goes_back_with_the_cache(self) -> None:
        model, ids = tiny_model("llama").cuda(), torch.arange(3, 43, device="cuda")[None]
        with attach(model) as session:
            held = []
            for _ in range(4):
                generate(session, ids, max_new_tokens=9, graph="piecewise")
                session.static_caches.clear()
                gc.collect()  # caches and their recorded steps refer to each other
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                held.append(torch.cuda.memory_reserved())
        assert held[1] == held[2] == held[3]  # the first leaves cuBLAS its workspace


def _noted(graphs: list[FakeGraph]) -> Callable[[], FakeGraph]:
    def new() -> FakeGraph:
        graphs.append(FakeGraph())
        return graphs[-1]

    return new


def _failing(end: Callable[[], None]) -> Callable[[], None]:
    """A graph's end that fails the first time, once the recorder is out of the way."""
    left = [1]

    def failing() -> None:
        if left:
            left.pop()
            end()
            raise RuntimeError("stop")

    return failing
