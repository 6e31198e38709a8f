"""Perplexity equals a direct computation from one pass of the plain model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import longreach
from longreach.adapters.transformers import Answer, Reader, attach, shape_of
from longreach.errors import InvalidInput, MeasurementFailed
from longreach.evals.methods import specs
from longreach.evals.perplexity import BINS, Curve, Perplexity, Text, read_text
from longreach.methods.kascade.plan import KascadePlan
from longreach.plans import Plan, PlannedModel
from longreach.testing.tiny import BOS_ID, tiny_model, tiny_tokenizer
from tests.methods.planned import MADE
from tests.tiers import swept

LENGTH, DECODED = 70, 8


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Text]:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "a.txt").write_text("The hen laid an egg in the hay, and then another one. " * 4)
    (folder / "b.txt").write_text("Größe zählt: ein Fuchs schlief. " * 5, encoding="utf-8")
    return [read_text(folder / name, tiny_tokenizer()) for name in ("a.txt", "b.txt")]


@torch.no_grad()
def direct(model: Any, windows: list[list[int]]) -> torch.Tensor:
    """-log p [windows, LENGTH - 1] from whole passes of transformers' own model."""
    ids = torch.tensor(windows)
    logits = model(ids, use_cache=False).logits[:, :-1].double()
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")


def measured(
    model: Any, texts: list[Text], methods: list[str], chunk: int = 512, keep: Any = lambda *_: None, **options: Any
) -> Any:
    task = Perplexity(
        model, tiny_tokenizer(), texts, specs(methods), **{"length": LENGTH, "decode_tokens": DECODED, **options}
    )
    found, failed = task.run(chunk, keep=keep)
    assert failed == []
    return task, found


def test_what_a_method_knows_of_the_prompt_is_of_the_prompt_alone(model: Any, texts: list[Text]) -> None:
    """The ring of MAC holds rows of the text before what is decoded, as if no more had been read."""
    method = "mac window=16 band=4 tau=0.0 min_context=0"
    kept = dict[str, Any]()
    task, found = measured(model, texts, [method], keep=kept.__setitem__, limit=2)
    for part, window in zip(kept.values(), task.windows, strict=True):
        with attach(model, decode=task.specs[1].decode) as session:
            reader, at = Reader(session), LENGTH - DECODED - 1
            reader.read(window[:at], then=DECODED + 1)
            read = session.report().fraction("prefill")
            nll = task._decode(reader, window, Answer())
        (label,) = (name for name in part["decode"] if name != "dense")
        keys, values, metadata, dense = part["bytes"][label]
        assert read is not None and read > 1 and (keys + values + metadata) / dense == pytest.approx(read)
        assert part["bytes"]["dense"] == [dense // 2, dense // 2, 0, dense]
        assert sum(part["decode"][label]["sums"]) == pytest.approx(float(nll.double().sum()), rel=1e-5)
    assert found[label]["prefill_reads"]["total"] > 1


def test_a_number_does_not_depend_on_what_else_is_measured(texts: list[Text], tmp_path: Path) -> None:
    """Nor on what is decoded: a prefill that pools over rows reads the text without its end."""
    model = tiny_model("llama", num_hidden_layers=3)
    path = tmp_path / "p.json"
    found = KascadePlan(anchors=(0, 2), head_map=((0, 1),) * 3, layers=(0, 1, 2), k=4, tile=64)
    Plan("kascade", PlannedModel.of("tiny", shape_of(model)), found.values(), MADE).save(path)
    options = f"prefill.k=4 prefill.plan={path}"
    one, other = f"kascade/dense {options}", f"kascade/mac window=16 band=4 min_context=0 {options}"
    alone = measured(model, texts, [one], limit=1)[1]
    task, both = measured(model, texts, [one, other], limit=1)
    assert {k: v for k, v in both[one].items() if k != "seconds"} == {
        k: v for k, v in alone[one].items() if k != "seconds"
    }
    with attach(model, prefill=task.specs[1].prefill) as session:
        nll = []
        for window in task.windows:
            reader = Reader(session)
            reader.read(window[: LENGTH - DECODED - 1], then=DECODED + 1)
            nll.append(task._decode(reader, window, Answer()))
    assert alone[one]["decode"]["nll"] == pytest.approx(float(torch.cat(nll).double().mean()), rel=1e-5)


@pytest.mark.parametrize("chunk", swept([13, 1, 512], 1))
def test_dense_is_the_plain_model(model: Any, texts: list[Text], chunk: int) -> None:
    task, found = measured(model, texts, ["oracle_top_k k=1.0"], chunk)
    whole = len(texts[0].tokens) // (LENGTH - 1) + len(texts[1].tokens) // (LENGTH - 1)
    assert len(task.windows) == whole and all(w[0] == BOS_ID and len(w) == LENGTH for w in task.windows)
    for number, window in enumerate(task.windows[: len(texts[0].tokens) // (LENGTH - 1)]):
        assert window[1:] == list(texts[0].tokens[number * (LENGTH - 1) : (number + 1) * (LENGTH - 1)])
    expected = direct(model, task.windows)
    for result in found.values():
        read, decoded = result["prefill"], result["decode"]
        assert read["tokens"] == expected.numel() and decoded["tokens"] == whole * DECODED
        assert read["nll"] == pytest.approx(float(expected.mean()), rel=1e-5)
        assert read["perplexity"] == pytest.approx(math.exp(float(expected.mean())), rel=1e-5)
        assert decoded["nll"] == pytest.approx(float(expected[:, -DECODED:].mean()), rel=1e-5)
        bins = read["by_position"]
        assert len(bins) == BINS and bins[0]["start"] == 1 and bins[-1]["stop"] == LENGTH
        for part in (*bins, *decoded["by_position"]):
            mean = float(expected[:, part["start"] - 1 : part["stop"] - 1].mean())
            assert part["nll"] == pytest.approx(mean, rel=1e-5)
        assert result["prefill_reads"]["total"] == 1 and result["seconds"]["read"] > 0
    assert found["dense"]["decode_reads"]["total"] == 1 < found["oracle_top_k k=1.0"]["decode_reads"]["total"]


def test_a_narrow_window_tells_in_decoding_and_in_prefill(model: Any, texts: list[Text]) -> None:
    narrow, whole = "streaming_llm sinks=1 window=4", "streaming_llm/streaming_llm prefill.sinks=1 prefill.window=4"
    _, found = measured(model, texts, [narrow, whole], 9)
    dense = found["dense"]
    assert found[narrow]["prefill"] == dense["prefill"] != found[whole]["prefill"]
    assert found[narrow]["decode"]["nll"] != pytest.approx(dense["decode"]["nll"], rel=1e-4)
    assert found[narrow]["decode_reads"]["total"] < 0.15 and found[whole]["prefill_reads"]["total"] < 0.3


def test_an_interrupted_run_goes_on(model: Any, texts: list[Text]) -> None:
    methods = ["streaming_llm sinks=1 window=4", "streaming_llm/streaming_llm prefill.sinks=1 prefill.window=4"]
    task, once = measured(model, texts, methods)
    kept: dict[str, Any] = {}

    def keep(name: str, part: Any) -> None:
        if len(kept) == 5:
            raise KeyboardInterrupt
        kept[name] = json.loads(json.dumps(part))

    with pytest.raises(KeyboardInterrupt):
        task.run(512, keep=keep)
    fresh: dict[str, Any] = {}
    again, _ = task.run(512, done=kept, keep=fresh.__setitem__)
    assert len(kept) == 5 and len(fresh) == 2 * len(task.windows) - 5
    for label, expected in once.items():
        assert {**again[label], "seconds": 0} == {**expected, "seconds": 0}


def crashing(task: Perplexity, numbers: set[int], label: str | None, patch: pytest.MonkeyPatch) -> None:
    """Crash in these windows, when reading or when decoding with that method."""
    victims = [task.windows[number] for number in numbers]
    name = "score" if label is None else "decode"
    work = getattr(Reader, name)

    def crash(self: Reader, *args: Any, **more: Any) -> Any:
        window = args[0] if label is None else here["window"] if here["label"] == label else None
        if window in victims:
            raise RuntimeError("a kernel\nfailed")
        return work(self, *args, **more)

    here: dict[str, Any] = {}
    decoded = Perplexity._decoded

    def noting(self: Perplexity, session: Any, reader: Any, spec: Any, window: Any) -> Any:
        here.update(window=window, label=spec.label)
        return decoded(self, session, reader, spec, window)

    patch.setattr(Perplexity, "_decoded", noting)
    patch.setattr(Reader, name, crash)


def test_a_window_that_crashes_is_left_out_for_all_and_told(
    model: Any, texts: list[Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow, whole = "streaming_llm sinks=1 window=4", "streaming_llm/streaming_llm prefill.sinks=1 prefill.window=4"
    task, once = measured(model, texts, [narrow, whole])
    kept: dict[str, Any] = {}
    with monkeypatch.context() as patch:
        crashing(task, {1}, narrow, patch)
        found, failed = task.run(512, keep=kept.__setitem__)
    assert failed == [{"method": narrow, "window": 1, "error": "RuntimeError: a kernel failed"}]
    for label, expected in once.items():
        for phase in ("prefill", "decode"):
            rest = [nll for n, nll in enumerate(expected[phase]["by_window"]) if n != 1]
            assert found[label][phase]["by_window"] == pytest.approx(rest, rel=1e-6)
    assert len(kept) == 2 * len(task.windows) - 1 and "dense|1" not in kept
    again, failed = task.run(512, done=kept)
    assert failed == [] and {**again[narrow], "seconds": 0} == {**once[narrow], "seconds": 0}
    with monkeypatch.context() as patch:
        crashing(task, {0, 2}, None, patch)
        found, failed = task.run(512)
    assert [(f["method"], f["window"]) for f in failed] == [
        (label, n) for label in ("dense", narrow, whole) for n in (0, 2)
    ]
    assert found["dense"]["prefill"]["by_window"] == [
        nll for n, nll in enumerate(once["dense"]["prefill"]["by_window"]) if n not in (0, 2)
    ]


def test_a_method_that_always_crashes_takes_no_other_with_it(
    model: Any, texts: list[Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = "streaming_llm sinks=1 window=4"
    task, once = measured(model, texts, [narrow])
    everywhere = set(range(len(task.windows)))
    with monkeypatch.context() as patch:
        crashing(task, everywhere, narrow, patch)
        found, failed = task.run(512)
    assert list(found) == ["dense"] and len(failed) == len(task.windows)
    assert found["dense"]["decode"] == once["dense"]["decode"]
    crashing(task, everywhere, None, monkeypatch)
    with pytest.raises(MeasurementFailed, match=r"no window was measured with all methods: .*RuntimeError: a kernel"):
        task.run(512)


def test_windows_tell_how_sure_the_mean_is(model: Any, texts: list[Text]) -> None:
    task, found = measured(model, texts, [])
    read = found["dense"]["prefill"]
    each = direct(model, task.windows).mean(1).tolist()
    assert read["by_window"] == pytest.approx(each, rel=1e-5)
    low, high = read["interval_95"]
    assert min(each) <= low < read["nll"] < high <= max(each)


def test_no_likelihood_is_too_small_to_say() -> None:
    assert Curve(1, 3).over([[700.0, 700.0]])["perplexity"] == pytest.approx(math.exp(700))
    assert Curve(1, 3).over([[800.0, 800.0]])["perplexity"] == math.inf
    assert math.isnan(Curve(1, 3).over([[math.nan, 1.0]])["perplexity"])


def test_without_decoding_and_with_a_limit(model: Any, texts: list[Text]) -> None:
    task, found = measured(model, texts, [], decode_tokens=0, limit=1)
    assert len(task.windows) == 1 and found["dense"]["decode"] is None and found["dense"]["decode_reads"] is None
    assert found["dense"]["prefill"]["interval_95"] is None  # one window


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 5000}, "context is 4096"),
        ({"length": 300}, r"longest text has 216 tokens, a window takes 299"),
        ({"decode_tokens": 68}, r"expected 0 to 67 of windows of 70, got 68"),
        ({"decode_tokens": -1}, "got -1"),
    ],
)
def test_what_cannot_be(model: Any, texts: list[Text], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        measured(model, texts, [], **options)


def test_files_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "latin").write_bytes(b"gr\xfc\xdfe")
    for name, message in [("empty", "is empty"), ("latin", r"not UTF-8 text \(byte 2\)"), ("none", "cannot read")]:
        with pytest.raises(InvalidInput, match=message):
            read_text(tmp_path / name, tiny_tokenizer())


def test_fusion_and_eviction_are_refused_by_name(model: Any) -> None:
    with pytest.raises(InvalidInput, match="'dense evict=snapkv': evict=snapkv: perplexity reads windows"):
        Perplexity(model, tiny_tokenizer(), [], specs(["dense evict=snapkv"]))


@pytest.mark.parametrize("variant", ["fastmka", "mka", "block_mka"])
def test_converted_models(variant: str, texts: list[Text]) -> None:
    """Running means cannot be cut to the beginning of what is decoded, so the prompt is read again."""
    options: dict[str, Any] = {} if variant == "fastmka" else {"block": 4, "window": 8, "blocks": 2}
    converted = longreach.convert(tiny_model("llama"), variant, gate=0.7, **options)
    method = "dense" if variant == "block_mka" else "quest k=1.0"
    task, found = measured(converted, texts, [method], chunk=16, limit=2)
    want = direct(converted, task.windows)
    for entry in found.values():
        assert entry["prefill"]["nll"] == pytest.approx(float(want.mean()), rel=1e-5)
        assert entry["decode"]["nll"] == pytest.approx(float(want[:, -DECODED:].mean()), rel=1e-5)
