"""A whole report: every kind of record in, Markdown, one page and pictures out."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from longreach.errors import InvalidInput
from longreach.records.report import report
from tests.records.report import factory
from tests.records.report.page import Page
from tests.records.report.plots.test_plots import pixels

NASTY = "<script>alert('x')</script> | `tick` **b** [l](http://evil.example)\n\n# head\r\n" + "宽😀" * 3000 + "\u202e\0"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A report of three sweeps, tasks with hostile answers, perplexity and fidelity."""
    folder = tmp_path_factory.mktemp("records")
    small = factory.small()
    entry = small["tasks"]["vt"]
    entry["samples"][1]["expected"] = [NASTY]
    wrong = entry["results"]["streaming_llm window=0.1"]["answers"]
    wrong[1]["text"] = NASTY
    wrong[2].update(error=NASTY, text="")
    entry["results"]["streaming_llm window=0.1"]["failed"] = 1
    contents = {f"sweep-{n}.json": factory.sweep(n) for n in (1024, 2048)}
    contents |= {"a|<b>&`c`.json": small, "p.json": factory.perplexity(), "f.json": factory.fidelity()}
    paths = [factory.save(folder, content, name) for name, content in contents.items()]
    written, warnings = report(paths, folder / "out")
    assert warnings == []
    return folder / "out", written


def test_what_is_written(made: tuple[Path, list[Path]]) -> None:
    folder, written = made
    assert sorted(written) == sorted(folder.iterdir())
    assert [p.name for p in written] == [
        "report.html", "report.md", "eval-quality-decode.png", "eval-sweep.png", "perplexity-nll.png",
        "fidelity-kl.png", "fidelity-layer-error.png",
    ]  # fmt: skip
    for path in written[2:]:
        assert pixels(path.read_bytes()).std() > 0.02


def test_the_page_needs_nothing_else(made: tuple[Path, list[Path]]) -> None:
    folder, written = made
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert "script" not in page.tags and "link" not in page.tags and "url(" not in text and "@import" not in text
    assert all(r.startswith("data:image/png;base64,") or r[1:] in page.targets for r in page.references)
    images = [base64.b64decode(i["src"].partition(",")[2]) for i in page.images]
    assert images == [p.read_bytes() for p in written if p.suffix == ".png"]
    assert len(page.targets) == 6  # tasks, perplexity, fidelity, failed, wrong, repeat


def test_hostile_answers_show_as_they_are(made: tuple[Path, list[Path]]) -> None:
    folder, _ = made
    page = Page((folder / "report.html").read_text())
    begins = "<script>alert('x')</script> | `tick` **b** [l](http://evil.example)\\n\\n# head\\r\\n宽😀"
    shown = [cell for row in page.cells for cell in row if cell.startswith(begins)]
    assert len(shown) == 3 and all(len(cell) < 400 for cell in shown)  # expected, said, and the error
    markdown = (folder / "report.md").read_text()
    assert "<script" not in markdown and "http://" not in markdown and "\0" not in markdown
    outside = re.sub(r"(?s)^(`{3,})\n.*?\n\1$", "", markdown, flags=re.MULTILINE)
    for line in outside.splitlines():
        assert not line.startswith("# ") or line == "# Report: small-model"
    tables = re.findall(r"(?m)((?:^\|.*\n)+)", outside)
    for table in tables:  # every row has as many cells as its head
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_markdown_and_page_hold_the_same_numbers(made: tuple[Path, list[Path]]) -> None:
    folder, _ = made
    markdown, page = (folder / "report.md").read_text(), (folder / "report.html").read_text()
    row = next(line for line in markdown.splitlines() if line.startswith("| niah_single_1 |"))
    assert row.endswith("| 100.0% (83.9-100.0%) | 15.0% (5.2-36.0%) ▼ | 95.0% (76.4-99.1%) |")
    (cells,) = [r for r in Page(page).cells if r[0] == "niah_single_1" and "4.25" in r]
    assert [" ".join(c.split()) for c in cells[-3:]] == ["100.0% 83.9-100.0%", "15.0% ▼ 5.2-36.0%", "95.0% 76.4-99.1%"]


def test_the_same_records_make_the_same_report(tmp_path: Path) -> None:
    path = factory.save(tmp_path, factory.small())
    one, _ = report([path], tmp_path / "one")
    two, _ = report([path], tmp_path / "two")
    assert [p.read_bytes() for p in one] == [p.read_bytes() for p in two]
    assert report([path], tmp_path / "one")[0] == one  # over the earlier one


def test_nothing_is_written_where_one_record_is_none(tmp_path: Path) -> None:
    good, bad = factory.save(tmp_path, factory.small()), tmp_path / "bad.json"
    bad.write_text(json.dumps({**factory.small(), "format": 2}))
    with pytest.raises(InvalidInput, match=r"bad\.json.*format 2"):
        report([good, bad], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_groups_of_evaluations_have_pictures_of_their_own(tmp_path: Path) -> None:
    other: dict[str, Any] = factory.small()
    other["config"]["seed"] = 5
    other["dirty"] = True
    paths = [factory.save(tmp_path, factory.small(), "a.json"), factory.save(tmp_path, other, "b.json")]
    written, warnings = report(paths, tmp_path / "out")
    assert {"eval-1-quality-decode.png", "eval-2-quality-decode.png"} <= {p.name for p in written}
    assert any("DIRTY" in w for w in warnings)
    page = Page((tmp_path / "out" / "report.html").read_text())
    assert "b.json was measured from a DIRTY tree" in page.text


def test_importing_it_loads_nothing_heavy() -> None:
    code = "import sys, longreach.records.report; assert not {'matplotlib', 'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
