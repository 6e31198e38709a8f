"""`longreach compare`: the table, the JSON, options per method."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from longreach.adapters.transformers import Reader
from longreach.methods.registry import FUSIONS, METHODS, names
from longreach.records.report.reading import load
from longreach.testing.tiny import save_tiny
from tests.cli.test_bad_input import refused

WIDTHS = (80, 120)


def compared(model: Path, document: Path, *more: Any) -> list[Any]:
    return ["compare", "--model", model, "--document", document, "--steps", 4, *more]


def left_out(err: str) -> set[str]:
    """Methods that are said not to be measured, and nothing else is said."""
    found = [re.fullmatch(r"longreach: (\w+) is left out: .*; make one for it: longreach calibrate .*", line)
             for line in err.splitlines()]  # fmt: skip
    assert all(found)
    return {match[1] for match in found if match}


@pytest.mark.parametrize("width", WIDTHS)
def test_the_table_fits_the_terminal(
    longreach: Any, tiny: Path, document: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    result = longreach(*compared(tiny, document))
    assert result.code == 0 and left_out(result.err) == set()
    lines = result.out.splitlines()
    assert all(len(line) <= width for line in lines)
    header = next(line for line in lines if line.startswith("decode"))
    assert ("meta" in header) == (width == 120)
    rows = [line.split() for line in lines if line.split(" ")[0] in METHODS]
    assert [row[0] for row in rows] == [*names("decode"), "streaming_llm", "kascade", "block_mka"]
    assert rows[0][1:6] == ["0", "none", "in", "4", "100.0%"]
    assert sum(line.startswith("-- ") for line in lines) == 4  # one heading per prefill method
    assert "Measured just now on this machine" in result.out
    told = " ".join(lines)  # for methods whose plan the session would have made
    assert all(f"No {name} plan: the prompt has 133 tokens, and" in told for name in ("kascade", "loki"))


def test_json_holds_every_method_with_its_options(longreach: Any, tiny: Path, document: Path) -> None:
    chosen = ["--methods", "streaming_llm", "--set", "streaming_llm.window=16", "--question", "Who slept?"]
    found = json.loads(longreach(*compared(tiny, document, *chosen, "--json")).out)
    pairs = [(c["prefill"]["name"], c["decode"]["name"]) for c in found["comparisons"]]
    assert pairs == [("dense", "dense"), ("dense", "streaming_llm"), ("streaming_llm", "streaming_llm")]
    assert found["prompt_tokens"] == 1 + len(f"{document.read_text().rstrip()}\n\nQuestion: Who slept?\nAnswer:")
    for c in found["comparisons"][1:]:
        assert c["decode"]["window"] == 16 and c["steps"] == 4 and len(c["kl_steps"]) == 5
        reads = c["decode_reads"]
        assert reads["total"] == pytest.approx(reads["keys"] + reads["values"] + reads["metadata"])
        steps = [found["prompt_tokens"] + i + 1 for i in range(4)]
        assert reads["total"] == pytest.approx(20 * 4 / sum(steps))
    assert found["comparisons"][2]["prefill"]["window"] == 16


def test_a_record_with_layers_that_reports_read(longreach: Any, tiny: Path, document: Path, tmp_path: Path) -> None:
    record = tmp_path / "f.json"
    command = ["compare", "--model", tiny, "--document", document, "--steps", 4, "--layers", "--output", record]
    result = longreach(*command, "--method", "streaming_llm sinks=1 window=5", "--method", "oracle_top_k k=9")
    assert result.code == 0, result.err
    found = load(record).content
    assert found["config"]["document_sha256"] == hashlib.sha256(document.read_bytes()).hexdigest()
    assert list(found["results"]) == ["dense", "streaming_llm sinks=1 window=5", "oracle_top_k k=9"]
    assert found["results"]["dense"]["layer_error"]["max"] == [[0.0] * 4] * 2
    errors = found["results"]["streaming_llm sinks=1 window=5"]["layer_error"]["mean"]
    assert f"{sum(errors[1]) / 4:.2e}" in result.out and "error of oracle_top_k k=9" in result.out
    assert found["results"]["oracle_top_k k=9"]["prefill_layer_error"] is None
    whole = "streaming_llm/streaming_llm window=5 prefill.window=5"
    result = longreach(*command, "--method", whole)
    read = load(record).content["results"][whole]["prefill_layer_error"]
    assert f"{sum(read['mean'][1]) / 4:.2e}" in result.out
    assert f"error of streaming_llm prefill on {read['rows']} rows of the prompt" in result.out
    refused(longreach(*command, "--method", "dense", "--set", "streaming_llm.window=3"), "leave out --methods")
    refused(longreach(*command[:-1], "/proc/none/f.json"), "cannot write /proc/none")


@pytest.fixture
def documents(document: Path, tmp_path: Path) -> list[Any]:
    other, system = tmp_path / "other.txt", tmp_path / "system.txt"
    other.write_text("Boats leave at noon. Nobody slept.")
    system.write_text("Answer from the documents.\n")
    return ["--documents", document, other, "--system", system, "--chunk-tokens", 40]


def test_sampling_and_error_bars_are_shown(longreach: Any, tiny: Path, document: Path, tmp_path: Path) -> None:
    record = tmp_path / "r.json"
    method = "magicpig bits=3 tables=9 local=4 seal=4 centre=8 dense_layers=[0] error_bars=True"
    result = longreach("compare", "--model", tiny, "--document", document, "--steps", 4, "--past-end", "--method",
                       "dense", "--method", method, "--output", record)  # fmt: skip
    assert result.code == 0, result.err
    dense, mine = json.loads(record.read_text())["results"].values()
    assert "error_bars" not in dense and "sampling" not in dense
    (error,), words = mine["error_bars"]["relative_error"], " ".join(result.out.split())
    assert f"error {100 * error:.1f}%, redone 0.0%, bytes {100 * mine['error_bars']['bytes']:.1f}%" in words
    parts = mine["sampling"]["search"] + mine["sampling"]["attention"] + mine["error_bars"]["bytes"]
    assert mine["decode_reads"]["total"] == pytest.approx(0.5 + parts / 2)
    assert f"search {100 * mine['sampling']['search']:.1f}%" in words
    assert longreach("report", "--output", tmp_path / "report", record).code == 0


def test_documents_are_compared_for_every_fusion_method(longreach: Any, tiny: Path, documents: list[Any]) -> None:
    result = longreach("compare", "--model", tiny, *documents, "--steps", 3)
    assert result.code == 0, result.err
    rows = [line for line in result.out.splitlines() if line.startswith("dense")]
    assert [row.split()[1].removeprefix("fuse=") for row in rows[1:]] == list(FUSIONS)
    assert all(len(line) <= 80 for line in result.out.splitlines()[2:])


def test_documents_in_json_and_a_record(longreach: Any, tiny: Path, documents: list[Any], tmp_path: Path) -> None:
    record, store = tmp_path / "f.json", tmp_path / "chunks"
    command = ["compare", "--model", tiny, *documents, "--steps", 3, "--question", "Who slept?", "--store", store,
               "--method", "dense fuse=a3 fuse.ratio=1.0", "--method", "dense fuse=pie evict=snapkv", "--set",
               "evict.capacity=60"]  # fmt: skip
    found = json.loads(longreach(*command, "--json").out)
    dense, exact, evicted = found["comparisons"]
    assert found["chunks"] == 4 and dense["fusion"] is None and max(exact["kl_steps"]) < 1e-5
    assert len(exact["kl_steps"]) == 4 and exact["fusion"]["recomputed"] > 0 == exact["fusion"]["reused"]
    assert evicted["evict"]["capacity"] == 60 and evicted["fuse"]["name"] == "pie" and evicted["kl_steps"][0] > 0
    assert longreach(*command, "--output", record).code == 0
    kept = load(record).content
    assert kept["results"][evicted["label"]]["fusion"] == evicted["fusion"]
    assert kept["methods"][evicted["label"]]["evict"]["capacity"] == 60 and len(kept["config"]["documents"]) == 2
    told = longreach("report", record, "--output", tmp_path / "report")
    again = (tmp_path / "report" / "report.md").read_text()
    assert told.code == 0 and "--chunk-tokens 40" in again and "fuse=pie evict=snapkv" in again
    assert "--system" in again and str(documents[1]) in again


@pytest.mark.parametrize("size", [None, 256])
def test_dense_reads_documents_in_one_pass_by_default(
    longreach: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int | None
) -> None:
    (tmp_path / "long.txt").write_text("The fox slept all day long. " * 30)  # a token a byte
    passes, read = list[int](), Reader.read

    def noted(reader: Reader, tokens: Sequence[int], *more: Any, **options: Any) -> Any:
        passes.append(-(-len(tokens) // reader.chunk))
        return read(reader, tokens, *more, **options)

    monkeypatch.setattr(Reader, "read", noted)
    record = tmp_path / "f.json"
    given = [] if size is None else ["--prefill-chunk-size", size]
    result = longreach("compare", "--model", tiny, "--documents", tmp_path / "long.txt", "--steps", 2, "--methods",
                       "pie", "--output", record, *given)  # fmt: skip
    assert result.code == 0, result.err
    tokens = load(record).content["config"]["prompt_tokens"]
    assert set(passes) == {1 if size is None else -(-tokens // size)} and tokens > 800
    assert load(record).content["config"]["prefill_chunk_size"] == size and "a pass" not in result.out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--methods", "quest"], ["unknown fuse method 'quest'", "a3_deep"]),
        (["--methods", ","], ["no methods to compare", "full_reuse"]),
        (["--methods", "a3", "--method", "dense fuse=a3"], ["leave out --methods"]),
        (["--set", "a3.ratio=0.3"], ["unknown slot in --set 'a3'", "fuse, evict"]),
        (["--method", "dense fuse=random"], ["unknown fuse method 'random'"]),
        (["--document", "x.txt"], ["not allowed with argument"]),
        (["--question", " "], ["--question is empty"]),
        (["--method", "dense fuse=a3_deep fuse.layer=8"], ["layer of the model"]),
        (["--method", "dense fuse=pie evict=snapkv evict.capacity=9"], ["capacity 9 is less than"]),
    ],
)
def test_documents_that_cannot_be_compared(
    longreach: Any, tiny: Path, documents: list[Any], more: list[str], words: list[str]
) -> None:
    refused(longreach("compare", "--model", tiny, *documents, "--steps", 3, "--json", *more), *words)


def test_what_belongs_to_documents(longreach: Any, tiny: Path, document: Path, tmp_path: Path) -> None:
    refused(longreach(*compared(tiny, document, "--system", document)), "--system: a --document is kept whole")
    refused(longreach(*compared(tiny, document, "--chunk-tokens", 9)), "--chunk-tokens", "give --documents")
    refused(longreach(*compared(tiny, document, "--method", "dense fuse=a3")), "give --documents FILE instead")
    empty = tmp_path / "empty.txt"
    empty.write_text(" ")
    refused(longreach("compare", "--model", tiny, "--documents", empty), "is empty")


@pytest.mark.parametrize("document", ["--document", "--documents"])
def test_a_method_given_twice_is_refused(longreach: Any, tiny: Path, document: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A hen.")
    start = ["compare", "--model", tiny, document, tmp_path / "a.txt", "--question", "Who?"]
    one, two = ("dense fuse=pie", "pie") if document == "--documents" else ("quest k=4", "quest")
    for more, message in (
        (["--method", one, "--method", one.replace(" ", "  ")], f"--method: {one!r} is given 2 times; give it once"),
        (["--methods", f"{two},{two},{two}"], f"--methods: {two!r} is given 3 times; give it once"),
    ):
        result = longreach(*start, *more)
        assert result.code == 2 and message in result.err


def test_methods_that_a_model_cannot_use_are_left_out_by_name(longreach: Any, document: Path, tmp_path: Path) -> None:
    """Jamba has no rotation, which MAC would undo."""
    model = save_tiny(tmp_path / "jamba", "jamba")
    result = longreach(*compared(model, document, "--prefill-chunk-size", 4096))
    assert result.code == 0, result.err
    assert "longreach: mac is left out: JambaForCausalLM has no rotary embedding" in result.err
    rows = [line.split()[0] for line in result.out.splitlines() if line.split(" ")[0] in METHODS]
    assert "quest" in rows and "mac" not in rows
    refused(longreach(*compared(model, document, "--methods", "mac")), "JambaForCausalLM has no rotary embedding")
