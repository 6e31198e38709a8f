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
    {"runtime"},
    {"adapters"},
    {"tasks", "records"},
    {"evals", "bench"},
    {"train"},
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
# rooms whose members stand side by side, and the members that all others may import
SHARED = {
    "ops": {
        "types",
        "selection",
        "impl",
        "reference_chunks",
        "partial",
        "carry",
        "rope",
        "directions",
        "checks",
        "head_parts",
        "doors",
        "host_calls",
        "numba_dots",
        "numba_fit",
        "numba_host",
        "numba_host_inputs",
        "numba_inputs",
        "numba_math",
        "numba_pool",
        "numba_pool_kernels",
        "numba_softmax",
        "tile_lists",
        "triton_copies",
        "triton_copies_kernels",
        "triton_carry",
        "triton_pieces",
        "triton_reads",
    },
    "methods": {
        "automatic",
        "base",
        "call",
        "choosing",
        "error_bars",
        "model_config",
        "plan_maker",
        "plan_rows",
        "registry",
        "slots",
        "values",
    },
    "adapters": set[str](),
}
# member -> the sibling whose front door, no more, it may use
BUILT_ON = {("adapters", "lm_eval"): "transformers", ("ops", "mix"): "attend"}


def imports(tree: ast.AST) -> list[str]:
    """Dotted names of what a file imports, anywhere in it: `from a import b` is "a.b"; a relative one begins with ".".

    Calls of import_module with a literal count; names that are put together at run time (registries) cannot be read.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            found += [str(node.args[0].value)] if called in ("import_module", "__import__") else []
    return found


def complaints(place: tuple[str, ...], name: str) -> list[str]:
    """What is wrong with importing a name at a place: the parts of a path in the package, without ".py"."""
    room, member = place[0], place[1] if len(place) > 1 else "__init__"
    top, *rest = name.split(".")
    if not top:
        return ["is relative; write it in full"]
    if room == "testing":
        return []
    if top == "triton":
        kernels = room == "ops" and place[-1].startswith("triton")
        return [] if kernels else ["only ops/**/triton*.py may"]
    if top in ("numba", "llvmlite"):
        kernels = room == "ops" and place[-1].startswith("numba")
        return [] if kernels else ["only ops/**/numba*.py may"]
    if top in DOORS and "/".join(place[:2]) != DOORS[top]:
        return [f"only {DOORS[top]} may"]
    if top != "longreach":
        return []
    other, target = rest[0] if rest else "", rest[1] if len(rest) > 1 else "__init__"
    if other not in RANK:  # the lazy front door leads to every room
        return [] if room == "cli" else ["goes through the package's front door; name the room"]
    if RANK[other] > RANK[room]:
        return ["points upward"]
    if other != room:
        return ["is a sibling room"] if RANK[other] == RANK[room] else []
    found = []
    if place[-1].startswith(("triton", "numba")) and "reference" in rest:
        found.append("is the reference, which no kernel imports")
    open_door = BUILT_ON.get((room, member)) == target and len(rest) <= 3
    if room in SHARED and target not in SHARED[room] and member not in ("__init__", target) and not open_door:
        found.append("is a sibling")
    return found


def faults(source: Path) -> list[str]:
    """What breaks the rules in a tree laid out like src/longreach."""
    found = []
    for path in sorted(source.rglob("*.py")):
        place = path.relative_to(source).with_suffix("").parts
        if len(place) == 1 and place[0] != "errors":
            continue  # the package's lazy front door names what it opens to
        if place[0] not in RANK:
            found.append(f"{path}: room {place[0]} has no rank")
            continue
        for name in sorted(set(imports(ast.parse(path.read_text(encoding="utf-8"))))):
            found += [f"{path}: imports {name}, which {why}" for why in complaints(place, name)]
    return found


def circles(source: Path) -> list[set[str]]:
    """Modules of a tree laid out like src/longreach that import each other, also through others, circle by circle.

    Imports inside functions count: they hide a circle and leave it there. Those for type checkers never run.
    """
    modules = dict[str, Path]()
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        modules[".".join(("longreach", *parts)).removesuffix(".__init__")] = path
    found = dict[str, set[str]]()
    for module, path in modules.items():
        named = imports(_without_types(ast.parse(path.read_text(encoding="utf-8"))))
        # "a.b.c" is module c of a.b, or a name in a.b
        targets = (name if name in modules else name.rpartition(".")[0] for name in named)
        found[module] = {target for target in targets if target in modules}
    reached = {module: _reachable(module, found) for module in modules}
    rings = {frozenset(m for m in reached[one] if one in reached[m]) for one in modules if one in reached[one]}
    return sorted((set(ring) for ring in rings), key=sorted)


def _without_types(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", getattr(node.test, "attr", "")) == "TYPE_CHECKING":
            node.body = []
    return tree


def _reachable(module: str, imported: dict[str, set[str]]) -> set[str]:
    seen, left = set[str](), [*imported[module]]
    while left:
        one = left.pop()
        if one not in seen:
            seen.add(one)
            left += imported[one]
    return seen


def test_no_modules_import_each_other() -> None:
    assert circles(SOURCE) == []


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ({"a.py": "from longreach.cli.b import f", "b.py": "def g():\n    from longreach.cli.a import f"}, "a b"),
        ({"a.py": "from longreach.cli import b", "b.py": "import longreach.cli.a"}, "a b"),
        (
            {"a.py": "import longreach.cli.b", "b.py": "import longreach.cli.c", "c.py": "import longreach.cli.a"},
            "a b c",
        ),
        ({"a.py": "import longreach.cli.b", "b.py": "import_module('longreach.cli.a')"}, "a b"),
        ({"a.py": "from longreach.cli.a import f"}, "a"),
        (
            {
                "a.py": "import longreach.cli.b",
                "b.py": "if TYPE_CHECKING:\n    x: int\nelse:\n    import longreach.cli.a",
            },
            "a b",
        ),
    ],
)
def test_a_circle_is_found(tmp_path: Path, files: dict[str, str], names: str) -> None:
    for file, text in files.items():
        write(tmp_path / "cli" / file, text)
    write(tmp_path / "cli" / "other.py", "import longreach.cli.a")  # leads to the circle, and is not in it
    assert circles(tmp_path) == [{f"longreach.cli.{name}" for name in names.split()}]


@pytest.mark.parametrize("guard", ["TYPE_CHECKING", "typing.TYPE_CHECKING"])
def test_imports_for_type_checkers_make_no_circle(tmp_path: Path, guard: str) -> None:
    write(tmp_path / "cli" / "a.py", "from longreach.cli.b import f")
    write(tmp_path / "cli" / "b.py", f"if {guard}:\n    from longreach.cli.a import f")
    assert circles(tmp_path) == []


def test_a_circle_through_the_front_of_a_package_is_found(tmp_path: Path) -> None:
    write(tmp_path / "cli" / "__init__.py", "from longreach.cli.a import f")
    write(tmp_path / "cli" / "a.py", "from longreach.cli import f")
    assert circles(tmp_path) == [{"longreach.cli", "longreach.cli.a"}]


def test_the_source_keeps_the_rules() -> None:
    rooms = set("ops cache plans methods runtime adapters cli errors.py".split())
    assert {path.name for path in SOURCE.iterdir()} >= rooms
    assert faults(SOURCE) == []


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("ops/a.py", "import longreach.methods.base", "upward"),
        ("ops/a.py", "from longreach import adapters", "upward"),
        ("errors.py", "from longreach.ops.types import Rows", "upward"),
        ("methods/dense.py", "from longreach.adapters.transformers import attach", "upward"),
        ("methods/dense.py", "from longreach.runtime import Pass", "upward"),
        ("runtime/state.py", "from longreach.adapters.transformers import attach", "upward"),
        ("runtime/forward.py", "import transformers", "only adapters/transformers"),
        ("cache/kv.py", "if TYPE_CHECKING:\n    from longreach.methods import base", "upward"),
        ("cli/run.py", "from longreach.testing import tiny", "upward"),
        ("tasks/x.py", "from longreach.records import write", "sibling room"),
        ("store/x.py", "import longreach.plans", "sibling room"),
        ("ops/rope.py", "from longreach.ops.attend import attend", "sibling"),
        ("ops/rope.py", "from longreach.ops import attend", "sibling"),
        ("methods/dense.py", "from longreach.methods.quest import Quest", "sibling"),
        ("methods/base.py", "from longreach.methods.quest import Quest", "sibling"),
        ("adapters/vllm/x.py", "from longreach.adapters.transformers import attach", "sibling"),
        ("adapters/lm_eval/x.py", "from longreach.adapters.transformers.attach import Session", "sibling"),
        ("adapters/transformers/x.py", "from longreach.adapters.lm_eval import LongreachLM", "sibling"),
        ("methods/a.py", "from longreach import attach", "front door"),
        ("methods/a.py", "import longreach", "front door"),
        ("methods/dense.py", "def f():\n    import transformers", "only adapters/transformers"),
        ("methods/dense.py", "import_module('transformers.cache_utils')", "only adapters/transformers"),
        ("adapters/transformers_more/x.py", "import transformers", "only adapters/transformers"),
        ("evals/x.py", "from lm_eval.api import model", "only adapters/lm_eval"),
        ("cache/kv.py", "import triton", "only ops"),
        ("ops/attend/api.py", "from numba import njit", "only ops"),
        ("ops/attend/numba_kernels.py", "from longreach.ops.attend.reference import attend", "reference"),
        ("ops/attend/api.py", "import triton.language as tl", "only ops"),
        ("ops/attend/triton_decode.py", "from longreach.ops.attend.reference import attend", "reference"),
        ("ops/a.py", "from .attend import attend", "relative"),
        ("attic/x.py", "", "no rank"),
    ],
)
def test_a_broken_rule_is_found(tmp_path: Path, file: str, text: str, complaint: str) -> None:
    write(tmp_path / file, text)
    (found,) = faults(tmp_path)
    assert complaint in found


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("methods/a.py", "import torch\nfrom longreach.methods.base import Method\nfrom longreach.ops import attend"),
        ("methods/quest/calibrate.py", "from longreach.methods.quest.bounds import page_bounds"),
        (
            "ops/attend/api.py",
            "from longreach.ops.attend.reference import attend\nfrom longreach.ops.types import Rows",
        ),
        ("ops/attend/triton_decode.py", "import triton"),
        ("adapters/transformers/load.py", "import transformers\nfrom longreach.methods.registry import METHODS"),
        (
            "adapters/lm_eval/x.py",
            "from lm_eval.api.model import LM\nfrom longreach.adapters.transformers import attach",
        ),
        ("cli/env.py", "import longreach"),
        ("testing/tiny.py", "import transformers\nfrom longreach.cli.main import main"),
        ("__init__.py", "from longreach.cli.main import main"),
    ],
)
def test_what_is_allowed_is_not_complained_about(tmp_path: Path, file: str, text: str) -> None:
    write(tmp_path / file, text)
    assert faults(tmp_path) == []


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
