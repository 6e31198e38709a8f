"""The tables of docs/magicpig/README.md that hold measurements are those of the record it names."""

from __future__ import annotations

from longreach.records.labels import short_label
from tests.doc_tables import ROOT, Row, record, tables

PAGE = (ROOT / "docs" / "magicpig" / "README.md").read_text()
BUDGETS = {"5%": "magicpig budget=0.05", "10%": "magicpig budget=0.1", "20%": "magicpig", "40%": "magicpig budget=0.4"}
REDONE = "magicpig bits=10 tables=75 dense_layers=[]"


def measured(method: str) -> Row:
    """Bytes read, error of the sparse layers, and KL."""
    options = set(method.split())
    (result,) = (
        r
        for label, r in record("mini-magicpig-fidelity")["results"].items()
        if set(short_label(label).split()) == options
    )
    means = [sum(layer) / len(layer) for layer in result["layer_error"]["mean"]]
    sparse = [mean for mean in means if mean > 0]
    return f"{100 * result['decode_reads']['total']:.1f}%", f"{sum(sparse) / len(sparse):.3f}", f"{result['kl']:.3f}"


def test_numbers_are_those_of_the_record() -> None:
    expected = {
        ("budget", "bytes read"): lambda name: measured(BUDGETS[name])[:1],
        ("method", "bytes read", "error", "KL"): measured,
        ("`redo`", "bytes read", "error", "KL"): lambda name: measured(
            REDONE if name == "None" else f"{REDONE} redo={name}"
        ),
    }
    found = [(head, rows) for head, rows in tables(PAGE) if "bytes read" in head]
    assert [head for head, _ in found] == list(expected)
    for head, rows in found:
        assert rows
        for name, *numbers in rows:
            assert tuple(numbers) == expected[head](name.strip("`")), name


def test_its_context_is_stated() -> None:
    config = record("mini-magicpig-fidelity")["config"]
    assert f"{config['steps']} steps after {config['prompt_tokens']} tokens" in " ".join(PAGE.split())
