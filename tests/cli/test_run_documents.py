"""`longreach run --documents`: chunks stored on the way, answers by fusion, what is reported and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longreach.adapters.transformers import FusionReport
from longreach.cli.run_documents import _copies
from longreach.testing.tiny import save_tiny

QUESTION = "What is the code for the barn?"


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    found = []
    for number, text in enumerate(
        ("The code for the barn is 4711.\n\nNobody slept. The door stood open, and wind blew.", "Boats leave at noon.")
    ):
        found.append(tmp_path / f"{number}.txt")
        found[-1].write_text(text)
    return found


def asked(model: Path, texts: list[Path], *more: Any) -> list[Any]:
    return ["run", "--model", model, "--documents", *texts, "--question", QUESTION, "--max-new-tokens", 8,
            "--chunk-tokens", 32, *more]  # fmt: skip


def test_chunks_are_stored_on_the_way_and_found_again(
    longreach: Any, tiny: Path, texts: list[Path], tmp_path: Path
) -> None:
    system = tmp_path / "system.txt"
    system.write_text("Answer from the documents.\n")
    more = ("--json", "--store", tmp_path / "chunks", "--system", system, "--set", "fuse.ratio=1.0")
    first = json.loads(longreach(*asked(tiny, texts, *more)).out)
    again = json.loads(longreach(*asked(tiny, [texts[1], texts[0]], *more)).out)
    assert [d["computed"] for d in first["documents"]] == [d["chunks"] for d in first["documents"]]
    assert [d["stored"] for d in again["documents"]] == [d["chunks"] for d in again["documents"]]
    assert first["fuse"] == {"name": "a3", "ratio": 1.0, "heads": "each"} and first["evict"] is None
    (answer,) = first["answers"]
    prompt = answer["prompt"]
    assert prompt["reused"] == 0 and prompt["recomputed"] > 0 and answer["first_token_seconds"] > 0
    assert prompt["exact"] + prompt["recomputed"] == sum(d["tokens"] for d in first["documents"])
    plain = "\n\n".join([system.read_text().rstrip(), *(t.read_text() for t in texts)])
    document = tmp_path / "whole.txt"
    document.write_text(plain)
    whole = longreach("run", "--model", tiny, "--document", document, "--question", QUESTION, "--max-new-tokens", 8,
                      "--json")  # fmt: skip
    assert json.loads(whole.out)["answers"][0]["answer"] == answer["answer"], "at ratio 1.0 it is a plain prefill"


@pytest.mark.parametrize("fuse", ["full_reuse", "pie", "legolink", "cacheblend", "a3", "a3_deep", "dependence"])
def test_every_fusion_answers_and_eviction_goes_with_it(
    longreach: Any, tiny: Path, texts: list[Path], fuse: str
) -> None:
    result = longreach(*asked(tiny, texts, "--fuse", fuse, "--evict", "snapkv", "--set", "evict.capacity=120",
                              "--question", "And when?"))  # fmt: skip
    assert result.code == 0 and f"> {QUESTION}" in result.out
    assert "reused" in result.err and "recomputed" in result.err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--fuse", "none"), "--fuse none with --documents: chunks are used by a fusion method; give --document"),
        (("--fuse", "epic"), "unknown fuse method 'epic'; known: none, full_reuse"),
        (("--prefill", "kascade"), "fuse=a3 with prefill=kascade: recomputed tokens attend densely"),
        (("--set", "fuse.ratio=2"), "ratio: expected a number in [0, 1], got 2"),
        (("--evict", "snapkv", "--set", "evict.capacity=0"), "capacity: expected a count >= 1, got 0"),
        (("--evict", "snapkv", "--set", "evict.capacity=20"), "capacity 20 is less than"),
        (
            ("--set", "evict.capacity=20"),
            "evict.capacity: an option of a method, and the evict slot has none; name the",
        ),
        (("--fuse", "a3_deep", "--set", "fuse.layer=99"), "layer: expected a layer of the model, which has 2 (0 to 1)"),
        (("--question", " "), "a --question is empty"),
        (("--max-new-tokens", "100000"), "but the model's context is"),
        (("--store", "{file}"), "0.txt"),
        (("--system", "missing.txt"), "cannot read missing.txt"),
    ],
)
def test_what_cannot_be_is_one_line(
    longreach: Any, tiny: Path, texts: list[Path], more: tuple[str, ...], message: str
) -> None:
    result = longreach(*asked(tiny, texts, *(x.format(file=texts[0]) for x in more)))
    assert result.code == 2 and message in result.err and len(result.err.strip().splitlines()) == 1


def test_documents_that_are_none(longreach: Any, tiny: Path, texts: list[Path], tmp_path: Path) -> None:
    empty, junk = tmp_path / "empty.txt", tmp_path / "junk.bin"
    empty.write_text(" \n")
    junk.write_bytes(b"\xff\x00\xfe")
    assert "is empty; leave it out" in longreach(*asked(tiny, [*texts, empty])).err
    assert "is not UTF-8 text (byte 0)" in longreach(*asked(tiny, [junk])).err
    both = longreach("run", "--model", tiny, "--document", texts[0], "--documents", texts[1], "--question", QUESTION)
    assert both.code == 2 and "not allowed with argument" in both.err
    alone = longreach("run", "--model", tiny, "--document", texts[0], "--fuse", "a3", "--question", QUESTION)
    assert alone.code == 2 and "--fuse: a --document is kept whole for all questions; give --documents" in alone.err
    cut = longreach("run", "--model", tiny, "--document", texts[0], "--chunk-tokens", 9, "--question", QUESTION)
    assert cut.code == 2 and "--chunk-tokens: a --document is kept whole" in cut.err


def test_a_store_of_another_model_dtype_or_system_prompt_is_told(
    longreach: Any, tiny: Path, texts: list[Path], tmp_path: Path
) -> None:
    other, store, system = save_tiny(tmp_path / "other", "qwen3", seed=3), tmp_path / "store", tmp_path / "system.txt"
    system.write_text("Be brief.")
    ways = (((), "of another model, or of other weights"), (("--dtype", "bfloat16"), "of another dtype (float32)"),
            (("--system", system), "behind another system prompt"))  # fmt: skip
    assert "the store had none" not in longreach(*asked(other, texts, "--store", store)).err, "it had nothing at all"
    for more, why in ways:
        result = longreach(*asked(tiny, texts, "--store", store, *more))
        assert result.code == 0 and "the store had none of these chunks" in result.err and why in result.err
        again = longreach(*asked(tiny, texts, "--store", store, *more))
        assert "the store had none" not in again.err and "Chunks: 4 stored, 0 computed, in " in again.err
    third = tmp_path / "third.txt"
    third.write_text("A fox.")
    other = longreach(*asked(tiny, [third, third], "--store", store)).err
    assert "the store had none of these chunks" in other and "of other documents, or cut otherwise" in other
    for path in store.rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-9])
    broken = longreach(*asked(tiny, texts, "--store", store))
    assert broken.code == 0 and "the store had none" not in broken.err


def test_dependence_is_computed_on_the_way_and_told(
    longreach: Any, tiny: Path, texts: list[Path], tmp_path: Path
) -> None:
    more = ("--json", "--store", tmp_path / "store")
    twice = (*asked(tiny, [*texts, *texts]), "--store", tmp_path / "other")
    assert "Chunks: 0 stored, 4 computed, in " in longreach(*twice).err, "a document given twice counts once"
    assert "Chunks: 4 stored, 0 computed, in " in longreach(*twice).err
    measured = longreach(*twice, "--fuse", "dependence").err
    assert "Chunks: 4 stored, 0 computed, dependence of 4 measured, in " in measured
    longreach(*asked(tiny, texts, *more))
    found = [json.loads(longreach(*asked(tiny, texts, *more, "--fuse", "dependence")).out) for _ in range(2)]
    for said, computed in zip(found, (3, 0), strict=True):  # the first of 4 chunks is exact
        assert sum(d["stored"] for d in said["documents"]) == 4
        assert sum(d["dependence_computed"] for d in said["documents"]) == computed


@pytest.mark.parametrize(
    ("loaded", "waited", "want"),
    [(0, None, ""), (3 << 30, None, "Copied to the device: 3.22 GB, without overlap. "),
     (5_000_000, 0.012, "Copied to the device: 5 MB, 12 ms waited for them. ")],
)  # fmt: skip
def test_copies_to_the_device(loaded: int, waited: float | None, want: str) -> None:
    report = FusionReport(9, 0, 0, 5, 4, (None,), (None,), loaded, waited)
    assert _copies(report) == want
