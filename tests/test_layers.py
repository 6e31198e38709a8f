"""Imports point down: the rule of ARCHITECTURE.md, read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import longreach

SOURCE = Path(longreach.__file__).parent
RANKS = (
    {"errors"},
    {"ops"},
    {"cache"},
    {"plans", "store"},
    {"methods", "mka"},
    {"adapters"},
    {"tasks", "records"},
    {"evals", "bench", "train"},
    {"cli"},
    {"testing"},
)
RANK = {room: i for i, rooms in enumerate(RANKS) for room in rooms}
# the only folder that may name each of these libraries
DOORS = {
    "transformers": "adapters/transformers",
    "accelerate": "adapters/transformers",
    "lm_eval": "adapters/lm_eval",
    "vllm": "adapters/vllm",
}
# rooms whose files stand side by side, and those of their files that all may import
SHARED = {
    "ops": {"types", "selection", "impl", "by_sequence", "partial", "checks"},
    "methods": {"base", "registry", "ledger"},
}


def imports(path: Path) -> list[str]:
    """Dotted names of modules that a file imports, anywhere in it, type-checking blocks included."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append(node.module or "")
    return found


def faults(source: Path) -> list[str]:
    """What breaks the rules in a tree laid out like src/longreach."""
    found = []
    for path in sorted(source.rglob("*.py")):
        relative = path.relative_to(source)
        if len(relative.parts) == 1 and relative.stem != "errors":
            continue  # the package's lazy front door names what it opens to
        room = relative.parts[0].removesuffix(".py")
        if room == "models":
            continue
        if room not in RANK:
            found.append(f"{relative}: room {room} has no rank")
            continue
        for name in imports(path):
            top, *rest = name.split(".")
            door = DOORS.get(top)
            if door and room != "testing" and not str(relative).startswith(door):
                found.append(f"{relative}: imports {top}, which only {door} may")
            if top == "triton" and not (room == "ops" and path.name.startswith("triton")):
                found.append(f"{relative}: imports triton outside ops/**/triton*.py")
            if top != "longreach" or not rest:
                continue
            other = rest[0]
            if room != "testing" and (other == "testing" or RANK.get(other, -1) > RANK[room]):
                found.append(f"{relative}: imports upward from {name}")
            if other != room and RANK.get(other) == RANK[room]:
                found.append(f"{relative}: imports the sibling room {name}")
            if room == other and room in SHARED and len(rest) > 1 and len(relative.parts) > 1:
                own, target = relative.parts[1].removesuffix(".py"), rest[1]
                if own not in ("__init__", target) and target not in SHARED[room] and own not in SHARED[room]:
                    found.append(f"{relative}: imports the sibling {name}")
    return found


def test_the_source_keeps_the_rules() -> None:
    assert faults(SOURCE) == []


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("ops/a.py", "import longreach.methods.base", "upward"),
        ("ops/rope.py", "from longreach.ops.attend import attend", "sibling"),
        ("methods/dense.py", "from longreach.methods.quest import Quest", "sibling"),
        ("methods/dense.py", "def f():\n    import transformers", "only adapters/transformers"),
        ("cache/kv.py", "import triton", "triton"),
        ("cli/run.py", "from longreach.testing import tiny", "upward"),
        ("tasks/x.py", "from longreach.records import write", "sibling room"),
        ("attic/x.py", "", "no rank"),
    ],
)
def test_a_broken_rule_is_found(tmp_path: Path, file: str, text: str, complaint: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    (found,) = faults(tmp_path)
    assert complaint in found


def test_what_is_allowed_is_not_complained_about(tmp_path: Path) -> None:
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods/a.py").write_text(
        "import torch\nfrom longreach.methods.base import AttentionMethod\nfrom longreach.ops import attend\n"
    )
    assert faults(tmp_path) == []
