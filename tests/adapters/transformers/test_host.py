"""Keys and values in host memory: the same tokens and the same reads as in GPU memory, for every decode method."""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longreach import CacheConfig, attach, generate
from longreach.adapters.transformers.loop.host_attend import LEAST
from longreach.adapters.transformers.prompt_reader import Answer, Reader
from longreach.cache import HostAttend
from longreach.cache.host import gib
from longreach.errors import CapacityError, HostCallFailed, InvalidInput, Unsupported
from longreach.methods.fusion import A3, PIE, CacheBlend
from longreach.methods.mac import MAC
from longreach.methods.magicpig import MagicPIG
from longreach.methods.snapkv import SnapKV
from longreach.runtime import Report
from longreach.testing.tiny import tiny_model
from tests.adapters.transformers.fusing.test_read import fused, prompt_of
from tests.adapters.transformers.reference import STEPS, model_of, padded_batch, prompt
from tests.adapters.transformers.turns import METHODS, SMALL
from tests.adapters.transformers.turns import plans_of_tests as plans_of_tests
from tests.methods.drive import LAYERS
from tests.methods.planned import tiny
from tests.poison import nan_memory
from tests.tiers import swept

HOST = CacheConfig(host=True)


@pytest.fixture(autouse=True)
def _nan_memory() -> Iterator[None]:
    with nan_memory(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* layers? whole at each step")
        yield


def reads(report: Report) -> Report:
    return replace(report, memory=None)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_decodes_the_same_tokens_with_the_same_reads(name: str) -> None:
    """Ragged prompts in chunks, some of which are staged; a second batch over the same cache; then a longer one."""
    tokens, mask = padded_batch((61, 40, 9))
    found = []
    for config in (CacheConfig(), HOST):
        with attach(tiny(), decode=METHODS[name], cache=config) as session:
            first = generate(session, tokens, mask, max_new_tokens=STEPS, prefill_chunk_size=17)
            second = generate(session, tokens.flip(0), mask.flip(0), max_new_tokens=STEPS)
            third = generate(session, second.sequences, max_new_tokens=3, prefill_chunk_size=30)
            found.append((*(x.sequences for x in (first, second, third)), session.report()))
    (*plain, plain_report), (*host, host_report) = found
    assert all(torch.equal(a, b) for a, b in zip(plain, host, strict=True))
    assert reads(plain_report) == reads(host_report)
    memory, whole = host_report.memory, set(METHODS[name].whole_layers(*facts()))
    assert plain_report.memory is None and memory is not None
    assert set(memory.device_layers) == (whole if len(whole) < LAYERS else set())
    assert set(memory.host_layers) == set(range(LAYERS)) - set(memory.device_layers)


def facts() -> tuple[Any, torch.dtype]:
    with attach(tiny()) as session:
        return session._shape, session.model.dtype


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"mac"}))  # whose reads follow its hits
def test_the_layers_that_a_method_names_are_those_it_reads_whole(name: str) -> None:
    with attach(tiny(), decode=METHODS[name]) as session:
        generate(session, prompt(200), max_new_tokens=4)
        whole = METHODS[name].whole_layers(session._shape, session.model.dtype)
        layers = [r for r in session.report().layers if r.phase == "decode"]
    assert {r.layer for r in layers if 2 * r.key_bytes >= r.dense_bytes} == set(whole)


def test_memory_that_grows_between_steps_makes_no_difference() -> None:
    ids, answers = prompt(250), []
    for config in (CacheConfig(), HOST):
        with attach(tiny(), decode=METHODS["quest"], cache=config) as session, torch.no_grad():
            cache = session.new_cache(1)
            logits = session.model(ids, past_key_values=cache).logits
            before, chosen = cache.kv.nbytes, []
            for _ in range(12):
                chosen.append(logits[:, -1:].argmax(-1))
                logits = session.model(chosen[-1], past_key_values=cache).logits
            more = session.model(prompt(40, seed=5), past_key_values=cache).logits  # staged over what has grown
            assert cache.kv.nbytes == 2 * before
            answers.append((torch.cat(chosen, 1), more, reads(session.report())))
    assert torch.equal(answers[0][0], answers[1][0]) and torch.equal(answers[0][1], answers[1][1])
    assert answers[0][2] == answers[1][2]


@pytest.mark.parametrize("name", ["quest", "magicpig", "mac", "dense"])
def test_answers_over_one_document_are_rolled_back(name: str) -> None:
    answers = []
    for config in (CacheConfig(), HOST):
        with attach(tiny(), decode=METHODS[name], cache=config) as session:
            reader = Reader(session, chunk=16)
            reader.read(prompt(70)[0].tolist(), then=40)
            for seed in (7, 8, 7):
                with closing(reader.ask(prompt(15, seed=seed)[0].tolist(), 8, (), Answer())) as asked:
                    answers.append(list(asked))
    assert answers[:3] == answers[3:] and answers[0] == answers[2]


def test_a_pass_that_fails_leaves_keys_in_host_memory_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, mask = padded_batch()
    model = tiny_model("llama")
    with attach(model, decode="quest", cache=HOST) as session:
        want = generate(session, tokens, mask, max_new_tokens=STEPS)
        plain, calls = model.model.layers[1].forward, [0]

        def forward(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == 2:
                raise KeyboardInterrupt
            return plain(*args, **kwargs)

        cache = session.new_cache(len(tokens))
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(model.model.layers[1], "forward", forward)
            generate(session, tokens, mask, max_new_tokens=STEPS, prefill_chunk_size=20, past_key_values=cache)
        assert cache.columns == 0 and cache.kv.lengths == [0] * len(tokens)
        again = generate(session, tokens, mask, max_new_tokens=STEPS, past_key_values=cache)
    assert torch.equal(again.sequences, want.sequences)


def test_sliding_windows_stay_in_gpu_memory() -> None:
    tokens, mask = padded_batch()
    with attach(model_of("gemma2"), decode="streaming_llm") as session:
        want = generate(session, tokens, mask, max_new_tokens=STEPS)
    with attach(model_of("gemma2"), decode="streaming_llm", cache=HOST) as session:
        got = generate(session, tokens, mask, max_new_tokens=STEPS)
        memory = session.report().memory
        assert memory is not None and set(memory.device_layers) == set(session.facts.cache_windows)
        assert memory.host_layers
    assert torch.equal(got.sequences, want.sequences)


@pytest.mark.parametrize("fusion", swept([A3(ratio=0.3), PIE(), CacheBlend(ratio=0.3)], 2), ids=lambda f: f.name)
def test_prompts_with_stored_chunks_are_placed_in_host_memory(fusion: Any) -> None:
    model = tiny()
    chunks = prompt_of(model).fused
    (logits, report, kept, answer), (host_logits, host_report, host_kept, host_answer) = (
        fused(model, chunks, fusion, decode=METHODS["quest"], config=config) for config in (CacheConfig(), HOST)
    )
    assert torch.equal(logits, host_logits) and answer == host_answer and report == host_report
    assert all(torch.equal(x, y) for a, b in zip(kept, host_kept, strict=True) for x, y in zip(a, b, strict=True))


def test_the_report_says_where_keys_and_values_lie() -> None:
    with attach(tiny(), decode=METHODS["quest"], cache=HOST) as session:
        generate(session, prompt(), max_new_tokens=3)
        report = session.report()
    memory = report.to_json()["memory"]
    assert memory["device_layers"] == [0] and memory["host_layers"] == [1, 2]
    assert memory["host_bytes"] == 2 * memory["device_bytes"] == memory["staging_bytes"] > 0
    assert "2 layers" in str(report).splitlines()[-1] and "in host memory; 1 layer" in str(report)
    with attach(tiny()) as session:
        generate(session, prompt(), max_new_tokens=3)
        assert "memory" not in session.report().to_json() and "host memory" not in str(session.report())


def test_layers_read_whole_from_host_memory_are_warned_of_once() -> None:
    with attach(tiny(), cache=HOST) as session:
        with pytest.warns(UserWarning, match=r"dense reads 3 layers whole at each step.* over the link for each new"):
            generate(session, prompt(), max_new_tokens=3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            generate(session, prompt(), max_new_tokens=3)
            session.switch(METHODS["quest"])
            generate(session, prompt(), max_new_tokens=3)


def test_mac_is_warned_of_as_it_reads_layers_whole_on_a_miss() -> None:
    with attach(tiny(), decode=MAC(), cache=HOST) as session:
        text = r"mac reads 3 layers whole at each step in which it finds nothing to reuse.*\(--device-memory\)"
        with pytest.warns(UserWarning, match=text):
            generate(session, prompt(), max_new_tokens=3)
    resident = replace(HOST, device_bytes=1 << 40)
    with attach(tiny(), decode=MAC(), cache=resident) as session, warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(session, prompt(), max_new_tokens=3)


def test_as_many_layers_as_fit_stay_in_gpu_memory() -> None:
    model = tiny_model("llama", num_hidden_layers=5)
    with attach(model, cache=HOST) as session:
        generate(session, prompt(), max_new_tokens=3)
        memory = session.report().memory
    assert memory is not None and not memory.device_layers
    each = memory.staging_bytes // 2
    for limit, layers in ((5 * each, 5), (5 * each - 1, 2), (3 * each, 1), (2 * each, 0)):
        with attach(model, cache=replace(HOST, device_bytes=limit)) as session:
            generate(session, prompt(), max_new_tokens=3)
            memory = session.report().memory
        assert memory is not None and memory.device_layers == tuple(range(layers))
        assert memory.device_bytes + memory.staging_bytes <= limit
    with attach(model, cache=replace(HOST, device_bytes=2 * each - 1)) as session:
        text = rf"does not hold the 2 staging buffers.*to at least {2 * each} \({gib(2 * each)}\), or lower the batch"
        with pytest.raises(CapacityError, match=text):
            generate(session, prompt(), max_new_tokens=3)
        assert not session.ledger.tallies
    with attach(model, decode=METHODS["quest"], cache=replace(HOST, device_bytes=each)) as session:
        text = (
            rf"to at least {2 * each} \(.*\), or to {3 * each} \({gib(3 * each)}\) to keep the 1 layer that goes there"
        )
        with pytest.raises(CapacityError, match=text):
            generate(session, prompt(), max_new_tokens=3)


def test_after_a_switch_layers_are_placed_for_the_new_method() -> None:
    with attach(tiny(), decode=METHODS["quest"], cache=HOST) as session:
        generate(session, prompt(), max_new_tokens=3)
        session.switch(METHODS["kascade"])
        generate(session, prompt(), max_new_tokens=3)
        memory = session.report().memory
    assert memory is not None and memory.device_layers == (0, 2)  # of both, as either may decode


def test_too_little_host_memory_is_said_before_a_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longreach.cache.host.available_bytes", lambda: 1000)
    with attach(tiny(), decode="quest", cache=HOST) as session:
        cache = session.new_cache(1)
        with pytest.raises(CapacityError, match=r"keys and values need .* of host memory, and 0\.98 KiB are free"):
            Reader(session).read(prompt()[0].tolist())
        with pytest.raises(CapacityError, match="Lower the batch"):
            generate(session, prompt(), max_new_tokens=3, past_key_values=cache)
        assert cache.columns == 0 and not any(cache.kv.memory)


def test_eviction_from_host_memory_is_refused() -> None:
    model = tiny()
    with pytest.raises(Unsupported, match=r"evict=snapkv: keys in host memory cannot be evicted; leave evict out"):
        attach(model, evict=SnapKV(capacity=32), cache=HOST)
    with attach(model, evict=SnapKV(capacity=32)) as session, pytest.raises(Unsupported, match="evict=snapkv"):
        session.new_cache(1, HOST)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", METHODS)
def test_captured_steps_read_host_memory_in_place(name: str) -> None:
    model, ids, made = tiny().cuda(), prompt(300).cuda(), []
    for config in (CacheConfig(), replace(HOST, host_attend="link")):
        with attach(model, decode=METHODS[name], cache=config) as session:
            answers = [
                generate(session, ids, max_new_tokens=16, prefill_chunk_size=chunk, compile="none")
                for chunk in (64, None, 200)
            ]
            made.append((answers, session.report()))
    (plain, plain_report), (host, host_report) = made
    for a, b in zip(plain, host, strict=True):
        assert a.captured == b.captured is not None and torch.equal(a.sequences, b.sequences)
    for x, y in zip(plain_report.layers, host_report.layers, strict=True):
        assert (x.bytes_read, x.dense_bytes, x.impl) == (y.bytes_read, y.dense_bytes, y.impl)
    assert host_report.memory is not None and host_report.memory.host_layers


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cache_that_ends_gives_pinned_memory_back() -> None:
    model, ids = tiny().cuda(), prompt(40).cuda()
    with attach(model, decode=METHODS["quest"], cache=HOST) as session:
        generate(session, ids, max_new_tokens=4)
        generate(session, torch.cat([ids] * 20, 1), max_new_tokens=4)  # another cache, as it is longer
        addresses = [pair[0].data_ptr() for pair in session.static_caches[1].kv.memory if pair]
    gc.collect()
    torch.cuda.synchronize()
    code = torch.cuda.cudart().cudaHostUnregister(addresses[-1])
    assert int(code) != 0, "it was unregistered with the cache"
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")  # takes the error of that call


CPU_ATTENDS = replace(HOST, host_attend="cpu")


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches on the CPU may be attended to "by the CPU": the program is called at once."""
    for module, name in (
        ("longreach.adapters.transformers.attach", "check_host_attend"),
        ("longreach.adapters.transformers.session_caches", "check_host_attend"), ("longreach.cache.kv", "check_attend")
    ):  # fmt: skip
        monkeypatch.setattr(sys.modules[module], name, lambda *given: None)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.filterwarnings("ignore:host_attend='cpu' .* has no effect")
def test_the_cpu_attends_for_every_method(name: str, as_on_gpu: None) -> None:
    """The same tokens, and the same reads."""
    tokens, mask = padded_batch((61, 40, 9))
    found = []
    for config in (HOST, CPU_ATTENDS):
        with attach(tiny(), decode=METHODS[name], cache=config) as session:
            first = generate(session, tokens, mask, max_new_tokens=STEPS, prefill_chunk_size=17)
            second = generate(session, first.sequences, max_new_tokens=STEPS)
            found.append((first.sequences, second.sequences, session.report()))
    (*link, link_report), (*cpu, cpu_report) = found
    assert all(torch.equal(a, b) for a, b in zip(link, cpu, strict=True))
    assert link_report.memory is not None and cpu_report.memory is not None
    assert link_report.memory.attend is None and cpu_report.memory.attend == HostAttend("cpu")
    used = {x.layer for x in cpu_report.layers if x.phase == "decode" and "cpu" in x.impl.split("+")}
    assert set(cpu_report.memory.cpu_layers) == used <= set(cpu_report.memory.host_layers)
    if name == "mac":  # whose attention and amending are one op
        assert "read over the link (no decode step was computed by the CPU)" in str(cpu_report.memory)
    else:
        assert used and "where the CPU attends to" in str(cpu_report.memory) and cpu_report.memory.calls_bytes
    for a, b in zip(link_report.layers, cpu_report.layers, strict=True):
        assert (a.key_bytes, a.value_bytes, a.dense_bytes) == (b.key_bytes, b.value_bytes, b.dense_bytes)
        # the program samples by look-ups and makes no lists, where Numba's kernel makes and counts some
        assert a.metadata_bytes == b.metadata_bytes or name == "magicpig"


def test_attention_by_the_cpu_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(Unsupported, match=r"host_attend='cpu' \(--host-attend\): it needs a model on a cuda device"):
        attach(tiny(), cache=CPU_ATTENDS)
    with attach(tiny(), cache=HOST) as session, pytest.raises(Unsupported, match="host_attend='cpu'"):
        session.new_cache(1, CPU_ATTENDS)
    with pytest.raises(InvalidInput, match="host_attend: expected one of auto, link, cpu, got 'gpu'"):
        CacheConfig(host=True, host_attend="gpu")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="host_attend: is for keys and values in host memory; give host=True"):
        CacheConfig(host_attend="link")


def test_the_cpu_asked_for_in_vain_is_warned_of_once(as_on_gpu: None) -> None:
    with attach(tiny(), decode="mac", cache=CPU_ATTENDS) as session:
        with pytest.warns(
            UserWarning, match=r"host_attend='cpu' \(--host-attend\) has no effect: mac reads keys in host"
        ):
            generate(session, prompt(), max_new_tokens=3)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            generate(session, prompt(), max_new_tokens=3)
    with attach(tiny(), decode="quest", cache=replace(CPU_ATTENDS, device_bytes=1 << 40)) as session:
        generate(session, prompt(), max_new_tokens=3)
        memory = session.report().memory
    assert memory is not None and not memory.host_layers and "attends" not in str(memory)


FAILING = {"quest": METHODS["quest"], "magicpig group": SMALL, "magicpig own": replace(SMALL, share="own")}


@pytest.mark.parametrize("name", FAILING)
def test_a_program_that_fails_fails_the_answer(name: str, as_on_gpu: None) -> None:
    """After 24 tokens, while MagicPIG's blocks enter its tables; the cache and the tables are as before the answer."""
    with attach(tiny(), decode=FAILING[name], cache=CPU_ATTENDS) as session:
        cache = session.new_cache(1)

        def answer(ids: torch.Tensor, **given: Any) -> torch.Tensor:
            made = generate(session, ids, max_new_tokens=30, past_key_values=cache, eos_token_id=(), **given)
            return made.sequences

        want = answer(prompt(150))
        columns, ids = cache.columns, torch.cat([want, prompt()], 1)
        again = answer(ids)
        cache.drop_columns(cache.columns - columns)
        seen: list[torch.Tensor] = []

        def put(tokens: torch.Tensor) -> None:
            seen.append(tokens)
            if len(seen) == 25:
                cache.kv.calls._status.fill(1)

        broken = SimpleNamespace(put=put, end=lambda: None)
        with pytest.raises(HostCallFailed, match="attention on the CPU failed: a list of keys names slots"):
            answer(ids, streamer=broken)
        assert cache.columns == columns and len(seen) == 25
        assert torch.equal(answer(ids), again)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def on_gpu(
    config: CacheConfig, name: str | MagicPIG, ids: Any, mask: Any = None, new: int = 24, **given: Any
) -> tuple[Any, Report]:
    """Tokens of three answers over one cache, the last two by replays of one captured step, and the report."""
    method = METHODS[name] if isinstance(name, str) else name
    with attach(tiny().cuda(), decode=method, cache=config) as session:
        answers = [
            generate(session, ids, mask, max_new_tokens=new, prefill_chunk_size=chunk, compile="none", **given)
            for chunk in (64, None, 200)
        ]
        return answers, session.report()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", [*METHODS, "magicpig own"])
def test_captured_steps_attend_on_the_cpu(name: str, batch: int) -> None:
    """Ragged prompts of a batch; the tokens are those of the step that reads over the link."""
    method = replace(SMALL, share="own") if name == "magicpig own" else METHODS[name]
    tokens, mask = (prompt(300), None) if batch == 1 else padded_batch((300, 221, 90, 9))
    mask = None if mask is None else mask.cuda()
    (link, link_report), (cpu, cpu_report) = (
        on_gpu(replace(HOST, host_attend=how), method, tokens.cuda(), mask) for how in ("link", "cpu")
    )
    for a, b in zip(link, cpu, strict=True):
        assert a.captured == b.captured is not None and torch.equal(a.sequences, b.sequences)
    assert (link_report.memory.attend.by, cpu_report.memory.attend.by) == ("link", "cpu")  # type: ignore[union-attr]
    apart = 1e-3 if name == "oracle_sampling" else 0  # its draws follow from scores, which differ by rounding
    for x, y in zip(link_report.layers, cpu_report.layers, strict=True):
        read = [z.key_bytes + z.value_bytes for z in (x, y)]
        assert x.dense_bytes == y.dense_bytes and read[1] == pytest.approx(read[0], rel=apart, abs=0)
    used = {x.layer for x in cpu_report.layers if x.phase == "decode" and "cpu" in x.impl.split("+")}
    assert used <= set(cpu_report.memory.host_layers) and (used or name == "mac")  # type: ignore[union-attr]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("graph", [False, "piecewise"])
@pytest.mark.parametrize("name", ["quest", "magicpig"])
def test_steps_that_are_not_one_graph_attend_on_the_cpu(name: str, graph: Any) -> None:
    link, cpu = (
        on_gpu(replace(HOST, host_attend=how), name, prompt(300).cuda(), graph=graph)[0] for how in ("link", "cpu")
    )
    for a, b in zip(link, cpu, strict=True):
        assert b.captured == (graph or None) and torch.equal(a.sequences, b.sequences)


@pytest.mark.gpu
@needs_gpu
def test_many_replays_attend_on_the_cpu() -> None:
    """Blocks of keys enter the tables meanwhile."""
    made = []
    for how in ("link", "cpu"):
        with attach(tiny().cuda(), decode=METHODS["magicpig"], cache=replace(HOST, host_attend=how)) as session:
            made.append(generate(session, prompt(100).cuda(), max_new_tokens=400, eos_token_id=()).sequences)
    assert torch.equal(made[0][:, :164], made[1][:, :164])  # rounding may choose another token later on


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["quest", "mac", "magicpig"])
def test_the_faster_way_is_measured_and_named(name: str) -> None:
    link, _ = on_gpu(replace(HOST, host_attend="link"), name, prompt(300).cuda(), new=LEAST)
    auto, report = on_gpu(HOST, name, prompt(300).cuda(), new=LEAST)
    for a, b in zip(link, auto, strict=True):
        assert torch.equal(a.tokens[:, :24], b.tokens[:, :24])  # rounding may choose another token later on
    assert report.memory is not None
    chosen = report.memory.attend
    assert chosen.link_ms is not None and chosen.cpu_ms is not None and chosen.why is None
    assert chosen.by == ("cpu" if chosen.cpu_ms < chosen.link_ms else "link")
    assert f"a step took {chosen.link_ms:.2f} ms over the link, {chosen.cpu_ms:.2f} ms by the CPU" in str(report)
    most = 3 * (LEAST - 1)
    assert all(x.rows <= most for x in report.layers if x.phase == "decode"), "steps that were measured do not count"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", FAILING)
def test_an_error_in_a_captured_step_is_raised(name: str) -> None:
    """Of the last job that was captured: the answer fails by name, and the cache holds what it held."""
    with attach(tiny().cuda(), decode=FAILING[name], cache=CPU_ATTENDS) as session:
        cache = session.new_cache(1, replace(CPU_ATTENDS, capacity=512))
        first = generate(session, prompt(200).cuda(), max_new_tokens=8, past_key_values=cache, eos_token_id=())
        columns, ids = cache.columns, torch.cat([first.sequences, prompt(5).cuda()], 1)
        good = generate(session, ids, max_new_tokens=8, past_key_values=cache, eos_token_id=()).sequences
        cache.drop_columns(cache.columns - columns)
        (decoder,) = cache.decoders.values()
        job = list(cache.kv.calls._jobs.values())[-1]
        before = int(job["program"][0])
        job["program"] = _failing_program()
        with pytest.raises(HostCallFailed, match="a compiled kernel failed"):
            generate(session, ids, max_new_tokens=8, past_key_values=cache, eos_token_id=())
        job["program"] = before
        assert cache.columns == columns and decoder.graph is not None
        again = generate(session, ids, max_new_tokens=8, past_key_values=cache, eos_token_id=()).sequences
        assert torch.equal(again, good)


def _failing_program() -> int:
    from longreach.ops import numba_host

    fail, failed = numba_host.fail, numba_host.FAILED

    def program(address: int, phase: int) -> None:
        fail(address, failed)

    return numba_host.program(program)


@pytest.mark.gpu
@needs_gpu
def test_graphs_are_freed_with_their_cache() -> None:
    ids = prompt(60).cuda()
    with attach(tiny().cuda(), decode=METHODS["magicpig"], cache=CPU_ATTENDS) as session:
        for length in (60, 400, 900):  # each a longer cache, and a graph of its own
            tokens = torch.cat([ids] * (length // 60), 1)
            want = generate(session, tokens, max_new_tokens=12).sequences
            gc.collect()
            assert torch.equal(generate(session, tokens, max_new_tokens=12).sequences, want)
    gc.collect()
    torch.cuda.synchronize()
