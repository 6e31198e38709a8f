"""`longreach store add`: an exact account, nothing computed twice, clear errors, and what was computed is kept."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longreach.adapters.transformers import Precompute, attach, fingerprint, load
from longreach.store import ChunkStore
from longreach.store.local import LocalFolder
from longreach.testing.tiny import BOS_ID, save_tiny, tiny_model, tiny_tokenizer
from tests.cli.test_bad_input import refused

TEXT = "The brown hen laid an egg.\n\nThe code for the barn is 4815162. The fox slept.\r\n" * 5


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_bytes(TEXT.encode())
    return path


def adding(tiny: Path, store: Path, *more: Any) -> list[Any]:
    return ["store", "add", "--store", store, "--model", tiny, "--chunk-tokens", 64, *more]


def added(longreach: Callable[..., Any], tiny: Path, store: Path, *more: Any) -> dict[str, Any]:
    result = longreach(*adding(tiny, store, *more, "--json"))
    assert result.code == 0, result.err
    return dict(json.loads(result.out))


def test_every_chunk_is_there_and_is_the_models(longreach: Any, tiny: Path, book: Path, tmp_path: Path) -> None:
    said = added(longreach, tiny, tmp_path / "store", book)
    (file,) = said["files"]
    text = book.read_bytes().decode()
    assert "".join(text[c["start"] : c["stop"]] for c in file["chunks"]) == text
    assert file["characters"] == file["tokens"] == file["restored_characters"] == len(text)
    assert file["joined_tokens_equal_whole"] and {c["state"] for c in file["chunks"]} == {"computed", "repeated"}
    different = {c["name"] for c in file["chunks"]}
    assert said["computed"] == said["chunks"] == len(different) < len(file["chunks"])
    assert [c["name"] for c in file["chunks"] if c["state"] == "computed"] == list(
        dict.fromkeys(c["name"] for c in file["chunks"])
    )
    model, tokenizer = load(tiny)
    assert said["model"] == {"name": tiny.name, "fingerprint": fingerprint(model).digest, "dtype": "float32"}
    with ChunkStore(tmp_path / "store") as store, attach(model) as session:
        work = Precompute(session)
        for c in file["chunks"]:
            tokens = tokenizer(text[c["start"] : c["stop"]], add_special_tokens=False).input_ids
            assert work.key(tokens).name == c["name"] and len(tokens) == c["tokens"] <= 64
            found, want = store.get(work.key(tokens)), work.compute(tokens)
            assert found is not None
            assert c["bytes"] == (tmp_path / "store" / f"{c['name']}.safetensors").stat().st_size > found.bytes
            for got, expected in zip((*found.keys, *found.values), (*want.keys, *want.values), strict=True):
                assert torch.equal(got, expected)
    assert said["store_bytes"] == sum(f.stat().st_size for f in (tmp_path / "store").glob("*.safetensors"))


def test_what_is_stored_is_not_computed_again(
    longreach: Any, tiny: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = added(longreach, tiny, tmp_path / "store", book)
    monkeypatch.setattr(Precompute, "compute", lambda *a: 1 / 0)
    again = added(longreach, tiny, tmp_path / "store", book, book)
    assert again["stored"] == first["computed"] and again["computed"] == again["tokens_computed"] == 0
    assert [c["name"] for c in again["files"][0]["chunks"]] == [c["name"] for c in first["files"][0]["chunks"]]


@pytest.mark.parametrize("how", ["flipped", "truncated", "foreign"])
def test_what_was_damaged_is_computed_anew_and_told(
    longreach: Any, tiny: Path, book: Path, tmp_path: Path, how: str
) -> None:
    store = tmp_path / "store"
    first = added(longreach, tiny, store, book)
    victim = store / f"{first['files'][0]['chunks'][1]['name']}.safetensors"
    good = victim.read_bytes()
    bad = {"flipped": good[:-9] + bytes([good[-9] ^ 1]) + good[-8:], "truncated": good[:-64], "foreign": b"no chunk"}
    victim.write_bytes(bad[how])
    result = longreach(*adding(tiny, store, book))
    assert result.code == 0 and "1 chunks were damaged in the store and were computed again" in result.out
    assert victim.name in result.err and "set aside" in result.err
    assert victim.read_bytes() == good
    said = added(longreach, tiny, store, book)
    assert said["recomputed"] == 0 and said["stored"] == said["chunks"]


def test_a_prefix(longreach: Any, tiny: Path, book: Path, tmp_path: Path) -> None:
    """It is in every key and in no chunk; '' is the start token alone."""
    store = tmp_path / "store"
    alone = added(longreach, tiny, store, book)
    start = added(longreach, tiny, store, book, "--prefix", "")
    behind = added(longreach, tiny, store, book, "--prefix", "Answer briefly.\n")
    (tmp_path / "system.txt").write_text("Answer briefly.\n")
    same = added(longreach, tiny, store, book, "--prefix-file", tmp_path / "system.txt")
    assert [x["config"]["prefix_tokens"] for x in (alone, start, behind, same)] == [0, 1, 17, 17]
    assert start["computed"] == behind["computed"] == alone["computed"] and same["stored"] == alone["computed"]
    assert behind["others_in_store"] == 2 * alone["computed"]
    model, tokenizer = load(tiny)
    with attach(model) as session, ChunkStore(store) as opened:
        tokens = tokenizer(TEXT[: start["files"][0]["chunks"][0]["stop"]], add_special_tokens=False).input_ids
        assert opened.get(Precompute(session, [BOS_ID]).key(tokens)) is not None
    result = longreach(*adding(tiny, store, book, "--prefix", "a", "--prefix-file", "b"))
    assert result.code == 2 and "not allowed with" in result.err


def test_a_store_of_another_model_is_no_help_and_no_harm(
    longreach: Any, tiny: Path, book: Path, tmp_path: Path
) -> None:
    other = save_tiny(tmp_path / "other", "qwen3", seed=3)
    first = added(longreach, other, tmp_path / "store", book)
    mine = added(longreach, tiny, tmp_path / "store", book)
    assert mine["stored"] == 0 and mine["computed"] == first["computed"] == mine["others_in_store"]
    half = added(longreach, tiny, tmp_path / "store", book, "--dtype", "bfloat16")
    assert half["computed"] == mine["computed"] and half["store_bytes"] > mine["store_bytes"]


def test_what_people_see(longreach: Any, tiny: Path, book: Path, tmp_path: Path) -> None:
    (tmp_path / "odd.txt").write_text("A hen </s> a fox.\n")
    result = longreach(*adding(tiny, tmp_path / "store", book, tmp_path / "odd.txt"))
    assert result.code == 0 and result.err == ""
    lines = result.out.splitlines()
    assert lines[0].split() == ["file", "chars", "tokens", "chunks", "stored", "computed", "recomputed", "size"]
    assert lines[1].startswith("book.txt") and lines[2].startswith("odd.txt") and max(map(len, lines[:3])) <= 80
    assert "odd.txt: the text spells out 1 control tokens of the tokenizer; they are read as text." in result.out
    assert "book.txt: 4 chunks are the same as others before them" in result.out
    assert "fingerprint" in result.out and "alone; " in result.out and "kB" in result.out


def test_storage_behind_a_url(longreach: Any, tiny: Path, book: Path) -> None:
    first = added(longreach, tiny, "memory://books", book)  # type: ignore[arg-type]
    again = added(longreach, tiny, "memory://books", book)  # type: ignore[arg-type]
    assert first["computed"] == again["stored"] == first["chunks"]
    listed = json.loads(longreach("store", "list", "--store", "memory://books", "--json").out)
    assert len(listed["chunks"]) == first["chunks"] and listed["chunks"][0]["last_used"] is None
    assert longreach("store", "list", "--store", "memory://books").code == 0
    assert longreach("store", "verify", "--store", "memory://books").code == 0
    refused(longreach(*adding(tiny, "memory://books", book, "--max-bytes", "1GB")), "memory://books")  # type: ignore[arg-type]


def test_standard_input_and_a_byte_order_mark(
    longreach: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    marked = added(longreach, tiny, tmp_path / "store", tmp_path / "marked.txt")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(TEXT.encode())))
    piped = added(longreach, tiny, tmp_path / "store", "-")
    assert piped["stored"] == piped["chunks"] == marked["computed"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["cannot read", "No such file", "FILE"]),
        (b"", ["is empty", "leave it out"]),
        (b" \n", ["is empty"]),
        (b"ab\xff", ["not UTF-8 text (byte 2)", "iconv"]),
    ],
)
def test_documents_that_are_refused(
    longreach: Any, tiny: Path, book: Path, tmp_path: Path, content: bytes | None, words: list[str]
) -> None:
    """Before anything is loaded, computed or made."""
    path = tmp_path / "x.txt"
    if content is not None:
        path.write_bytes(content)
    refused(longreach(*adding(tiny, tmp_path / "store", book, path)), str(path), *words)
    assert not (tmp_path / "store").exists()
    refused(longreach(*adding(tiny, tmp_path / "store", book, tmp_path)), "Is a directory")
    refused(longreach(*adding(tiny, tmp_path / "store", book, "--prefix-file", tmp_path / "p")), "--prefix-file")
    refused(longreach(*adding(tiny, tmp_path / "store", book, "--prefix", "a\udcff")), "--prefix must be text")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--chunk-tokens", 4097], ["longer than the model's context of 4096", "--chunk-tokens"]),
        (["--chunk-tokens", 0], ["at least 1"]),
        (["--max-bytes", "many"], ["expected a size such as 500MB"]),
        (["--device", "gpu"], ["'gpu'"]),
    ],
)
def test_options_that_are_refused(
    longreach: Any, tiny: Path, tmp_path: Path, more: list[Any], words: list[str]
) -> None:
    path = tmp_path / "long.txt"
    path.write_text("word" * 1300)
    refused(longreach(*adding(tiny, tmp_path / "store", path, *more)), *words)


def test_models_and_places_that_are_refused(longreach: Any, tiny: Path, book: Path, tmp_path: Path) -> None:
    refused(longreach(*adding(tmp_path / "none", tmp_path / "store", book)), "no model directory")
    refused(longreach(*adding(tiny, book, book)), "chunk store", str(book))
    refused(longreach(*adding(tiny, tmp_path, book)), "is no chunk store", "empty folder")


@pytest.mark.parametrize(
    ("number", "word"), [(errno.ENOSPC, "No space left"), (errno.EROFS, "Read-only"), (errno.EACCES, "denied")]
)
def test_a_disk_that_fails_keeps_what_was_computed(
    longreach: Any, tiny: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, word: str
) -> None:
    store, write, calls = tmp_path / "store", LocalFolder.write, list[int]()

    def failing(self: LocalFolder, *args: Any) -> bool:
        calls.append(1)
        if len(calls) == 3:
            raise OSError(number, os.strerror(number))
        return write(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFolder, "write", failing)
        refused(longreach(*adding(tiny, store, book)), "cannot write to", word, "2 of ", "go", "same command")
    assert len(list(store.glob("*.safetensors"))) == 2
    said = added(longreach, tiny, store, book)
    assert said["stored"] == 2 and said["computed"] == said["chunks"] - 2


def test_a_broken_file_that_cannot_be_replaced_is_an_error(
    longreach: Any, tiny: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    said = added(longreach, tiny, tmp_path / "store", book)
    last = tmp_path / "store" / f"{said['files'][0]['chunks'][-1]['name']}.safetensors"
    os.truncate(last, 100)
    with monkeypatch.context() as patch:
        patch.setattr(LocalFolder, "set_aside", refuse)
        result = longreach(*adding(tiny, tmp_path / "store", book))
    assert result.code == 2 and result.out == "" and "not used, left in place (Permission denied)" in result.err
    assert "broken file in the place of this chunk" in result.err and "cannot be replaced" in result.err
    assert added(longreach, tiny, tmp_path / "store", book)["recomputed"] == 1


def test_an_interrupt_keeps_what_was_computed(
    longreach: Any, tiny: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, calls = Precompute.compute, list[int]()

    def interrupted(self: Precompute, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return compute(self, *args)

    monkeypatch.setattr(Precompute, "compute", interrupted)
    result = longreach(*adding(tiny, tmp_path / "store", book))
    assert result.code == 130 and "2 of " in result.err and "the same command continues from there" in result.err
    assert added(longreach, tiny, tmp_path / "store", book)["stored"] == 2


@pytest.mark.sweep  # tests/store/test_processes.py has what the processes share
def test_two_processes_add_the_same_documents_at_once(longreach: Any, tiny: Path, book: Path, tmp_path: Path) -> None:
    """Each chunk is put by one of them, whole, and both succeed."""
    command = [sys.executable, "-m", "longreach", *map(str, adding(tiny, tmp_path / "store", book, "--json"))]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    outputs = [process.communicate(timeout=600) for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    first, second = (json.loads(out) for out, _ in outputs)
    assert first["counts"]["put"] + second["counts"]["put"] == first["chunks"] == second["chunks"]
    with ChunkStore(tmp_path / "store") as store:
        verified = store.verify_all()
        assert (verified.whole, verified.broken) == (first["chunks"], ())
    assert list((tmp_path / "store" / "writing").iterdir()) == []


def test_a_cap_below_the_documents_is_told(longreach: Any, tiny: Path, book: Path, tmp_path: Path) -> None:
    whole = added(longreach, tiny, tmp_path / "one", book)
    cap = whole["store_bytes"] // 2
    result = longreach(*adding(tiny, tmp_path / "two", book, "--max-bytes", cap, "--json"))
    said = json.loads(result.out)
    assert result.code == 0 and said["gave_way"] > 0 and said["store_bytes"] <= cap
    assert f"{said['gave_way']} of these chunks gave way" in result.err and "--max-bytes" in result.err
    refused(longreach(*adding(tiny, tmp_path / "three", book, "--max-bytes", "1kB")), "larger than", "0 of ")


# behind the head that run makes; exact; with dependence

SYSTEM, QUESTION = "Answer from the documents.\n", "What is the code for the barn?"


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    found = [tmp_path / name for name in ("system.txt", "first.txt", "second.txt")]
    for path, text in zip(
        found,
        (
            SYSTEM,
            TEXT[:150],
            "Boats leave at noon. Trains leave at six, or so people say here. Nobody knows when a bus comes.",
        ),
        strict=True,
    ):
        path.write_bytes(text.encode())
    return found


def asked(longreach: Any, model: Path, store: Path, files: list[Path], *more: Any) -> dict[str, Any]:
    result = longreach("run", "--model", model, "--store", store, "--documents", *files, "--question", QUESTION,
                       "--max-new-tokens", 4, "--chunk-tokens", 64, "--json", *more)  # fmt: skip
    assert result.code == 0, result.err
    return dict(json.loads(result.out))


@pytest.mark.parametrize("template", ["none", "chat", "without a system prompt"])
def test_run_finds_all_that_add_stored_behind_its_head(
    longreach: Any, tiny: Path, files: list[Path], tmp_path: Path, template: str
) -> None:
    model, store, (system, *texts) = tiny, tmp_path / "store", files
    if template != "none":
        model = tmp_path / "chat"
        tiny_model("llama").save_pretrained(model)
        tiny_tokenizer(chat=True).save_pretrained(model)
    behind = system if template != "without a system prompt" else ""
    said = added(longreach, model, store, *texts, "--system", behind)
    assert said["config"]["prefix_tokens"] > (20 if behind else 0) and said["computed"] == said["chunks"]
    ran = asked(longreach, model, store, texts[::-1], *(["--system", system] if behind else []))
    assert all(d["stored"] == d["chunks"] and not d["computed"] for d in ran["documents"])
    assert sum(d["chunks"] for d in ran["documents"]) == said["chunks"]
    again = added(longreach, model, store, *texts, "--system", behind)
    assert again["others_in_store"] == 0, "run stored nothing"


def test_exact_chunks_are_found_and_nothing_is_recomputed(
    longreach: Any, tiny: Path, files: list[Path], tmp_path: Path
) -> None:
    store, (system, *texts) = tmp_path / "store", files
    said = added(longreach, tiny, store, *texts, "--system", system, "--exact")
    assert said["computed"] == said["chunks"] > 3 and said["config"]["exact"]
    ran = asked(longreach, tiny, store, texts, "--system", system)
    (answer,) = ran["answers"]
    stored = sum(d["tokens"] for d in ran["documents"])
    assert answer["prompt"]["exact"] == stored and answer["prompt"]["recomputed"] == answer["prompt"]["reused"] == 0
    assert [d["exact"] for d in ran["documents"]] == [d["chunks"] for d in ran["documents"]]
    turned = asked(longreach, tiny, store, texts[::-1], "--system", system)
    assert turned["documents"][0]["stored"] == 0, "behind other documents they are other chunks"
    assert "everything before them" in longreach(*adding(tiny, store, *texts, "--system", system, "--exact")).out


def test_dependence_is_stored_and_run_computes_nothing(
    longreach: Any, tiny: Path, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, (system, *texts) = tmp_path / "store", files
    plain = added(longreach, tiny, store, *texts, "--system", system)
    assert plain["dependence"] == {"stored": 0, "computed": 0, "none": plain["chunks"]}
    said = added(longreach, tiny, store, *texts, "--system", system, "--dependence")
    assert said["stored"] == said["chunks"] and said["dependence"]["computed"] == said["chunks"]
    shown = longreach(*adding(tiny, store, *texts, "--system", system, "--dependence")).out
    assert f"Dependence: computed for 0 chunks, stored before for {said['chunks']}." in shown
    listed = json.loads(longreach("store", "list", "--store", store, "--json").out)["chunks"]
    assert len(listed) == said["chunks"] and all(c["dependence"] for c in listed)
    assert longreach("store", "verify", "--store", store).code == 0
    monkeypatch.setattr(Precompute, "compute", lambda *a: 1 / 0)
    ran = asked(longreach, tiny, store, texts, "--system", system, "--fuse", "dependence", "--set", "fuse.ratio=0.3")
    (answer,) = ran["answers"]
    prompt = answer["prompt"]
    assert prompt["recomputed"] == round(0.3 * prompt["tokens"]) and ran["fuse"]["name"] == "dependence"


def test_a_lone_chunk_has_no_dependence_and_that_is_told(longreach: Any, tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("The hen.")
    result = longreach(*adding(tiny, tmp_path / "store", text, "--dependence"))
    assert result.code == 0 and "missing for 1, as there is no other chunk to run before it" in result.out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--exact"], ["--exact: what is before each chunk follows from --system; give it too"]),
        (["--exact", "--dependence", "--system", ""], ["exact chunks are never recomputed; give one of the two"]),
        (["--system", "nowhere.txt"], ["cannot read nowhere.txt", "--system"]),
        (["--system", "", "--prefix", ""], ["not allowed with"]),
    ],
)
def test_ways_of_adding_that_do_not_go_together(
    longreach: Any, tiny: Path, book: Path, tmp_path: Path, more: list[str], words: list[str]
) -> None:
    result = longreach(*adding(tiny, tmp_path / "store", book, *more))
    assert result.code == 2 and all(word in result.err for word in words) and not (tmp_path / "store").exists()
