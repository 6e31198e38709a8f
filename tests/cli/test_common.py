"""Arguments: settings, documents."""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from longreach.cache import CacheConfig
from longreach.cli.common import byte_size, parse_settings, read_document, tell_compiled
from longreach.errors import InvalidInput, UnknownName

SLOTS = ("prefill", "decode")


@pytest.mark.parametrize(
    "text, value",
    [
        ("3", 3),
        ("0.3", 0.3),
        ("1e-3", 1e-3),
        ("true", True),
        ("False", False),
        ("None", None),
        ("[0, 1]", [0, 1]),
        ("all", "all"),
        ('"all"', "all"),
        ("a=b", "a=b"),
        (" 7 ", 7),
    ],
)
def test_values_are_json_or_words(text: str, value: object) -> None:
    found = parse_settings([f"decode.x={text}"], "slot", SLOTS)
    assert found == {"decode": {"x": value}} and type(found["decode"]["x"]) is type(value)


def test_settings_are_gathered_by_owner() -> None:
    settings = ["decode.a=1", "prefill.a=2", "decode.b=3"]
    assert parse_settings(settings, "slot", SLOTS) == {"decode": {"a": 1, "b": 3}, "prefill": {"a": 2}}
    assert parse_settings([], "slot", SLOTS) == {}


@pytest.mark.parametrize("setting", ["window=0.3", "decode.window", "decode.=3", ".window=3", "decode.window=", "="])
def test_what_is_no_setting_is_refused_with_an_example(setting: str) -> None:
    with pytest.raises(InvalidInput, match=r"SLOT\.OPTION=VALUE"):
        parse_settings([setting], "slot", SLOTS)


def test_other_faults_of_settings() -> None:
    with pytest.raises(UnknownName, match="unknown slot in --set 'evict'; known: prefill, decode"):
        parse_settings(["evict.x=1"], "slot", SLOTS)
    with pytest.raises(InvalidInput, match="set twice"):
        parse_settings(["decode.x=1", "decode.x=2"], "slot", SLOTS)
    with pytest.raises(InvalidInput, match="lists"):
        parse_settings(["decode.x=[0,"], "slot", SLOTS)


def test_documents_from_files_and_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = "\ufeffone\r\ntwo é\n".encode()  # a mark and line ends as Windows writes them
    (tmp_path / "d.txt").write_bytes(content)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    assert read_document(str(tmp_path / "d.txt")) == read_document("-") == "one\ntwo é\n"


def test_documents_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "latin.txt").write_bytes("caf\xe9 au lait".encode("latin-1"))
    with pytest.raises(InvalidInput, match=r"latin\.txt is not UTF-8 text \(byte 3\)"):
        read_document(str(tmp_path / "latin.txt"))
    (tmp_path / "blank.txt").write_text(" \n\t")
    with pytest.raises(InvalidInput, match=r"blank\.txt is empty"):
        read_document(str(tmp_path / "blank.txt"))
    with pytest.raises(InvalidInput, match=r"No such file.*--document"):
        read_document(str(tmp_path / "missing.txt"))
    with pytest.raises(InvalidInput, match="directory"):
        read_document(str(tmp_path))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"")))
    with pytest.raises(InvalidInput, match="standard input is empty"):
        read_document("-")


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("1", 1), ("800000", 800_000), ("500MB", 500_000_000), ("1.5 gb", 1_500_000_000), ("2GiB", 2 << 30), ("7B", 7)],
)
def test_sizes(text: str, bytes_: int) -> None:
    assert byte_size(text) == bytes_


@pytest.mark.parametrize("text", ["", "0", "-1", "MB", "5 apples", "1e9", "0.1B", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="such as 500MB or 2GiB"):
        byte_size(text)


@pytest.mark.parametrize(
    "attend, device, new, told",
    [
        ("cpu", "cuda", 3, True), ("auto", "cuda", 64, True), ("auto", "cuda", 63, False), ("link", "cuda", 99, False),
        ("auto", "cpu", 99, False),
    ],
)  # fmt: skip
def test_compiling_for_the_cpu_is_told(
    attend: str, device: str, new: int, told: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longreach.ops.impl.has_numba", lambda: True)
    tell_compiled(CacheConfig(host=True, host_attend=attend), torch.device(device), new)  # type: ignore[arg-type]
    assert ("compiles attention on the CPU" in capsys.readouterr().err) == told
    tell_compiled(CacheConfig(), torch.device("cuda"), 99)
    assert not capsys.readouterr().err
