"""Windows and prompts that calibration reads; too little text is refused with what is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longreach.adapters.transformers import load
from longreach.errors import InvalidInput
from longreach.evals.calibration.prompts import Prompt, Prompts, make
from longreach.tasks.registry import choose
from longreach.testing.tiny import BOS_ID, save_tiny


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(save_tiny(tmp_path_factory.mktemp("model") / "tiny"))


def text(folder: Path, name: str, size: int) -> Path:
    """A byte a token."""
    path = folder / name
    path.write_text("".join(chr(97 + n % 26) for n in range(size)))
    return path


def test_windows_at_even_distances_in_all_texts(loaded: Any, tmp_path: Path) -> None:
    paths = [text(tmp_path, "a.txt", 99 * 4 + 50), text(tmp_path, "b.txt", 99 * 2)]
    found = make(*loaded, paths, [], length=100, count=3)
    assert [len(p.tokens) for p in found.prompts] == [100] * 3 and found.tokens == 300
    assert {p.tokens[0] for p in found.prompts} == {BOS_ID}
    places = [(p.name.split()[0], int(p.name.split()[2])) for p in found.prompts]
    assert places == [("a.txt", 0), ("a.txt", 198), ("b.txt", 0)]  # six windows, every second one
    said = loaded[1].decode(found.prompts[1].tokens, skip_special_tokens=True)
    assert said == (tmp_path / "a.txt").read_text()[198 : 198 + 99]
    assert found.data == "3 windows of a.txt, b.txt; 100 tokens each"


def test_prompts_of_tasks_end_with_their_answers(loaded: Any) -> None:
    found = make(*loaded, [], choose("vt,niah_single_1"), length=1600, count=2, seed=3)
    assert [p.name for p in found.prompts] == ["vt 0", "vt 1", "niah_single_1 0", "niah_single_1 1"]
    assert all(1000 < len(p.tokens) <= 1600 for p in found.prompts)
    said = loaded[1].decode(found.prompts[2].tokens, skip_special_tokens=True)
    number = said.rsplit(" ", 1)[1]
    assert said.endswith(f"in the provided text is {number}") and said.count(number) == 2
    assert found.data == "2 prompts of each of vt, niah_single_1; 1600 tokens each"
    other = make(*loaded, [], choose("vt"), length=1600, count=2, seed=4)
    assert other.prompts[0] != found.prompts[0]
    again = make(*loaded, [], choose("vt,niah_single_1"), length=1600, count=2, seed=3)
    assert again == found and again.sha256 == found.sha256 != other.sha256


def test_prompts_cut_into_chunks_are_the_same_text_with_their_answers(loaded: Any) -> None:
    found = make(*loaded, [], choose("niah_single_1"), length=1600, count=1, chunk_tokens=200)
    (one,) = found.prompts
    said = loaded[1].decode(one.tokens[-one.answer :])
    assert one.answer and said.strip().isdigit() and said.strip() in loaded[1].decode(one.tokens[: -one.answer])
    assert len(one.chunks) > 2 and all(0 < stop - start <= 200 for start, stop in one.chunks)
    assert all(a[1] == b[0] for a, b in zip(one.chunks, one.chunks[1:], strict=False))
    assert one.chunks[0][0] > 0 and one.chunks[-1][1] < len(one.tokens) - one.answer
    whole = make(*loaded, [], choose("niah_single_1"), length=1600, count=1).prompts[0]
    assert whole.chunks == () and whole.answer == one.answer


def test_needles_in_a_text_of_ones_own(loaded: Any, tmp_path: Path) -> None:
    path = tmp_path / "hay.txt"
    path.write_text("\n\n".join(f"Dull grey sentence number {n} stands here. It says nothing." for n in range(60)))
    tasks = choose("niah_single_2,vt")
    found = make(*loaded, [], tasks, length=1600, count=1, haystack=path)
    said = loaded[1].decode(found.prompts[0].tokens, skip_special_tokens=True)
    assert "Dull grey sentence" in said and "special magic" in said and "needles hidden in hay.txt" in found.data
    assert "Dull" not in loaded[1].decode(make(*loaded, [], tasks, length=1600, count=1).prompts[0].tokens)


def test_the_hash_tells_prompts_apart() -> None:
    one, other = (Prompts("", tuple(Prompt("", p) for p in ps)) for ps in (((1, 2), (3,)), ((1,), (2, 3))))
    assert one.sha256 != other.sha256 and one.tokens == other.tokens == 3


@pytest.mark.parametrize(
    ("texts", "tasks", "options", "words"),
    [
        ((), "", {}, ["nothing to calibrate on", "--text"]),
        ((500,), "", {"count": 8}, ["8 prompts of 100 tokens are 792 tokens", "hold 500, enough for 5", "--prompts"]),
        ((50, 60), "", {"count": 1}, ["1 prompt of 100 tokens are 99 tokens", "hold 50 + 60, enough for 0"]),
        ((500,), "", {"least": 129}, ["prompts of 100 tokens are too short", "129 tokens are needed", "--length"]),
        ((500,), "", {"count": 0}, ["prompts: expected at least 1, got 0"]),
        ((500,), "", {"length": 5000}, ["expected at most 4096 tokens, the model's context"]),
        ((), "vt", {"length": 60}, ["vt"]),
        ((), "niah_single_1", {"length": 800, "least": 799}, ["niah_single_1: a prompt of", "799 are needed"]),
    ],
)
def test_too_little(loaded: Any, tmp_path: Path, texts: Any, tasks: str, options: Any, words: list[str]) -> None:
    paths = [text(tmp_path, f"{n}.txt", size) for n, size in enumerate(texts)]
    with pytest.raises(InvalidInput) as error:
        make(*loaded, paths, choose(tasks) if tasks else [], **{"length": 100, "count": 1, **options})
    for word in words:
        assert word in str(error.value)


def test_files_that_are_no_text(loaded: Any, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff\xff")
    for path, word in ((tmp_path / "a", "UTF-8"), (tmp_path / "none", "cannot read")):
        with pytest.raises(InvalidInput, match=word):
            make(*loaded, [path], [], length=100, count=1)
