"""sha256 of each Triton kernel's syntax tree, read from the sources: neither Triton nor a GPU is needed.

A hash covers the function, the functions it calls and the module constants it uses, wherever they are defined in the
package. Names of kernels, functions and files are left out, so a kernel that moves keeps its hash.
Comments, docstrings and layout do not count; local names, annotations, decorators and constants do.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import json
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from longreach.errors import LongreachError

PACKAGE = Path(__file__).parents[1]
FILES = "ops/**/triton*.py"  # the only files that may import Triton
_SKIPPED = {"ctx", "kind", "type_comment", "type_params", "returns"}  # no effect, or specific to a Python version
Form = list[Any] | str


class UnreadableKernel(LongreachError):
    """A kernel uses a name whose definition the sources do not show."""


@cache
def kernels(root: Path = PACKAGE) -> dict[tuple[str, str], str]:
    """(file below the package, function name) -> sha256, for every function decorated with `triton.jit`."""
    tree = _Tree(root)
    found = {}
    for path in sorted(root.glob(FILES)):
        file = path.relative_to(root).as_posix()
        module = tree.module(path)
        for node in module.tree.body:
            if isinstance(node, ast.FunctionDef) and any(_is_jit(d, module) for d in node.decorator_list):
                found[file, node.name] = module.hash_of(node.name)
    return found


def _is_jit(decorator: ast.expr, module: _Module) -> bool:
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
        return f"{module.imported(target.value.id)}.{target.attr}" == "triton.jit"
    return isinstance(target, ast.Name) and module.imported(target.id) == "triton.jit"


class _Tree:
    """The modules of a package, parsed once each."""

    def __init__(self, root: Path):
        self.root = root
        self._modules: dict[Path, _Module] = {}

    def module(self, path: Path) -> _Module:
        if path not in self._modules:
            self._modules[path] = _Module(self, path)
        return self._modules[path]

    def find(self, dotted: str) -> _Module | None:
        """The module "longreach.a.b"; None if the package has no such file."""
        first, *rest = dotted.split(".")
        if first != PACKAGE.name:
            return None
        place = self.root.joinpath(*rest)
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                return self.module(path)
        return None


class _Module:
    """One file and the definitions of its top-level names."""

    def __init__(self, tree: _Tree, path: Path):
        self._package, self.path = tree, path
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self._hashes: dict[str, str | None] = {}

    @cached_property
    def _bound(self) -> dict[str, list[ast.stmt]]:
        """Top-level name -> the statements that bind it."""
        found: dict[str, list[ast.stmt]] = {}
        for statement in _statements(self.tree.body):
            for name in _binds(statement):
                found.setdefault(name, []).append(statement)
        return found

    def imported(self, name: str) -> str | None:
        """The dotted name that an import binds to `name`, else None."""
        for statement in self._bound.get(name, ()):
            for alias in getattr(statement, "names", ()):
                if isinstance(statement, ast.Import) and _alias(alias) == name:
                    return alias.name if alias.asname else name
                if isinstance(statement, ast.ImportFrom) and _alias(alias) == name:
                    return f"{'.' * statement.level}{statement.module or ''}.{alias.name}"
        return None

    def alias(self, name: str) -> _Module | None:
        """The module of the package that `name` refers to, else None."""
        dotted = self.imported(name)
        return None if dotted is None else self._package.find(dotted)

    def reference(self, name: str) -> Form:
        """The definition of a global name: a hash if the package defines it, else its dotted name."""
        dotted = self.imported(name)
        if dotted is not None:
            if self._package.find(dotted) is not None:
                raise UnreadableKernel(f"{self.path}: a kernel uses the module {dotted}; name the attribute it uses")
            place, _, attribute = dotted.rpartition(".")
            owner = self._package.find(place)
            return ["import", dotted] if owner is None else owner.reference(attribute)
        if name in self._bound:
            return ["of", self.hash_of(name)]
        if hasattr(builtins, name):
            return ["builtin", name]
        raise UnreadableKernel(f"{self.path}: {name}, which a kernel uses, is defined nowhere in this file")

    def hash_of(self, name: str) -> str:
        """sha256 of the definition of a top-level name."""
        if name not in self._hashes:
            self._hashes[name] = None
            forms = [_definition(statement, name, self) for statement in self._bound[name]]
            self._hashes[name] = hashlib.sha256(json.dumps(forms).encode()).hexdigest()
        known = self._hashes[name]
        if known is None:
            raise UnreadableKernel(f"{self.path}: {name} is defined by itself; kernels cannot be recursive")
        return known


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported, including conditional ones."""
    for statement in body:
        yield statement
        for field in ("body", "orelse", "finalbody"):
            if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                yield from _statements(getattr(statement, field, []))


def _binds(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        yield statement.name
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        yield from map(_alias, statement.names)
    elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))


def _alias(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _definition(statement: ast.stmt, name: str, module: _Module) -> Form:
    """A statement without the name it binds; for `a, b = 1, 2` the value of `name`."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return _form(statement, module, _local_names(statement))
    value = getattr(statement, "value", None)
    place = 0
    for target in statement.targets if isinstance(statement, ast.Assign) else ():
        if isinstance(target, ast.Tuple):
            place = next(i for i, t in enumerate(target.elts) if name in {getattr(n, "id", "") for n in ast.walk(t)})
            if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
                place, value = 0, value.elts[place]
    return [type(statement).__name__, place, "" if value is None else _form(value, module, _local_names(value))]


def _local_names(node: ast.AST) -> frozenset[str]:
    """Names bound within a node: parameters and targets of assignments and loops."""
    found = {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
    return frozenset(found | {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)})


def _form(node: Any, module: _Module, local: frozenset[str]) -> Form:
    """A syntax tree as lists and strings, equal on every supported Python version."""
    if isinstance(node, list):
        return [_form(item, module, local) for item in node]
    if isinstance(node, ast.Name) and node.id not in local:
        return module.reference(node.id)
    if isinstance(node, ast.Attribute):
        owner = _module_of(node.value, module, local)
        if owner is not None:
            return owner.reference(node.attr)
    if isinstance(node, ast.Constant):
        return ["Constant", type(node.value).__name__, repr(node.value)]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = []
    for field, value in ast.iter_fields(node):
        defines = isinstance(node, (ast.FunctionDef, ast.ClassDef))
        if field in _SKIPPED or value is None or value == [] or (defines and field == "name"):
            continue
        if field == "body" and defines:
            value = value[1:] if _is_docstring(value[0]) else value
        fields.append([field, _form(value, module, local)])
    return [type(node).__name__, *fields]


def _module_of(node: ast.expr, module: _Module, local: frozenset[str]) -> _Module | None:
    """The module of the package that an expression such as `streams` or `merging.streams` refers to, else None."""
    if isinstance(node, ast.Name):
        return None if node.id in local else module.alias(node.id)
    if isinstance(node, ast.Attribute):
        owner = _module_of(node.value, module, local)
        return None if owner is None else owner.alias(node.attr)
    return None


def _is_docstring(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
