"""README's numbers are those of the records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longreach.bench import readme
from longreach.bench.readme import PAGES, PICTURES, markers, numbers, redrawn, rewritten, update
from longreach.bench.readme_models import WAYS, models
from longreach.bench.record import add
from longreach.errors import InvalidInput

ROOT = Path(__file__).parents[2]


def test_pages_are_up_to_date() -> None:
    for page, blocks in PAGES.items():
        text = (ROOT / page).read_text()
        assert rewritten(text, ROOT / "benchmarks/results", blocks) == text, "run `longreach bench readme`"


def test_a_row_has_our_best_pages_beside_contiguous_memory_and_the_fastest_other(tmp_path: Path) -> None:
    def entry(who: str, name: str, us: float) -> dict[str, Any]:
        return {"who": who, "name": name, "microseconds": {"median": us}, "tb_per_s": 1.0}

    ours = [entry("longreach", name, us) for name, us in (("contiguous", 9), ("page 16", 12), ("page 64", 11))]
    entries = [*ours, entry("flashinfer", "FlashInfer page 16", 8), entry("torch_sdpa", "torch", 7)]
    case = {"entries": entries, "targets": [], "device": {"name": "abacus"}, "commit": "c" * 40,
            "versions": {"torch": "2"}, "baselines": {"versions": {}}}  # fmt: skip
    name = "dense-128k-b1"
    add(tmp_path / "dense-decode.json", "dense-decode", name, case)
    assert f"| {name} | 9.0 us, 1.00 TB/s | page 64: 11.0 us | torch: 7.0 us | - | - |" in numbers(tmp_path)
    case["entries"] = [entries[0]]
    add(tmp_path / "dense-decode.json", "dense-decode", name, case)
    add(tmp_path / "dense-decode.json", "dense-decode", f"{name} impl=reference", case)
    written = numbers(tmp_path)
    assert f"| {name} | 9.0 us, 1.00 TB/s | - | - | - | - |" in written and "impl=" not in written


def test_whole_models_have_a_line_a_case(tmp_path: Path) -> None:
    def entry(name: str, us: float, **more: Any) -> dict[str, Any]:
        return {"name": name, "microseconds": {"median": us}, **more}

    case = {"shape": {"context": 8192, "batch": 4}, "device": {"name": "abacus"}, "commit": "c" * 40, "targets": []}
    peaks = (20 << 30, 10 << 30), (5 << 30, 30 << 30), (5 << 30, 3 << 30), (1 << 30, 2 << 30)
    ways = [
        entry(name, us, ttft_seconds=us / 4e3, memory={"prefill_peak": prefill, "decode_peak": decode})
        for name, us, (prefill, decode) in zip(WAYS, (8000.0, 6000.0, 2400.0, 2000.0), peaks, strict=True)
    ]
    add(tmp_path / "user.json", "user", "user-8k-b4", {**case, "entries": ways})
    add(tmp_path / "user.json", "user", "user-8k-b1", {**case, "entries": ways[1:]})  # one did not fit
    add(tmp_path / "user.json", "user", "user-8k-b4-methods", {**case, "entries": ways})
    before = {**case, "shape": {"context": 32768, "batch": 4}, "entries": [ways[0], ways[1], ways[3]]}
    add(tmp_path / "user.json", "user", "user-32k-b4", before)
    targets = [{"of": "quest", "reached": False, "missed_by": 0.25}, {"of": "loki", "reached": True, "missed_by": 0}]
    some = [entry("dense", 4000.0), entry("quest", 5000.0), entry("loki", 3000.0)]
    add(tmp_path / "steps.json", "steps", "steps-8k-b4", {**case, "entries": some, "targets": targets})
    written = models(tmp_path)
    assert written.count("| 8K, batch 4 |") == 2 and "batch 1" not in written
    assert "| 8K, batch 4 | 2.00, 1.50, 0.60, 0.50 | 8.00, 6.00, 2.40, 2.00 | 20.00, 30.00, 5.00, 2.00 | - |" in written
    assert "| 32K, batch 4 | 2.00, 1.50, -, 0.50 | 8.00, 6.00, -, 2.00 | 20.00, 30.00, -, 2.00 | - |" in written
    assert "| 8K, batch 4 | 4.00 | - | - | - | 1.25 | 0.75 | - | - | quest by 25.0% |" in written
    assert written.endswith("`steps`, measured on abacus, commit cccccccccccc.")


def test_only_what_lies_between_the_markers_changes(tmp_path: Path) -> None:
    blocks = ("records", "quality", "models", "headline")
    (a, b), (c, d), (e, f), (g, h) = map(markers, blocks)
    text = f"before {a}\nold\n{b} between {c}{d} after {e}{f}{g}{h}"
    nothing = f"{e}\nNo measurements yet.\n{f}{g}\nNo measurements yet.\n{h}"
    new = f"before {a}\n{numbers(tmp_path)}\n{b} between {c}\nNo evaluations yet.\n{d} after {nothing}"
    assert rewritten(text, tmp_path, blocks) == new
    with pytest.raises(InvalidInput, match="put them back"):
        rewritten("no markers", tmp_path, ("records",))


def test_without_records_nothing_is_wiped_out(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text((ROOT / "README.md").read_text())
    for place in (tmp_path / "missing", tmp_path):
        with pytest.raises(InvalidInput, match="holds no records"):
            update(tmp_path, "README.md", place)
    assert readme.read_text() == (ROOT / "README.md").read_text()


def test_pictures_are_drawn_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    for name in PICTURES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        assert (ROOT / name).is_file()
    results = ROOT / "benchmarks/results"
    assert redrawn(tmp_path, results) == dict.fromkeys(PICTURES, True)
    assert redrawn(tmp_path, results) == dict.fromkeys(PICTURES, False)
    assert redrawn(tmp_path, tmp_path) == {}, "pictures without records are left alone"
    monkeypatch.setattr(readme, "find_spec", lambda name: None)
    assert redrawn(tmp_path, results) == dict.fromkeys(PICTURES)
