"""docs/api.md: every public name of longreach with its signature and docstring.

Run: python -m tests.api_page    (writes the page)
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import longreach
from longreach.adapters.transformers.conversation import Reply
from longreach.runtime.report import LayerReport, Report
from tests.doc_tables import ROOT

PAGE = ROOT / "docs" / "api.md"
HEAD = """# Python API

Every public name of `longreach`, from its docstrings. `python -m tests.api_page` writes this page.
[python.md](python.md) shows how they work together; `longreach methods NAME` has a method's options.
"""
PARTS = {
    "Load, attach, generate": (
        "load",
        "attach",
        "detach",
        "Session",
        "generate",
        "Chat",
        "LongreachCache",
        "CacheConfig",
    ),
    "Measure": ("evaluate", "perplexity", "compare", "calibrate"),
    "Stored documents": ("Documents", "ChunkStore", "ChunkPool"),
    "Trained attention": ("convert", "mka.register", "mka.revert", "mka.parameter_groups"),
    "vLLM": ("vllm.report",),
    "Results": ("Report", "LayerReport", "Reply"),
    "Methods": (),  # all others
    "Errors": ("LongreachError",),
}
# classes of what public functions return, which nobody imports
RESULTS = {"Report": Report, "LayerReport": LayerReport, "Reply": Reply}
# members that users call, where a class has others for longreach's own modules
MEMBERS = {
    "Session": ("close", "load_cache", "new_cache", "prepare", "report", "reset_report", "switch"),
    "LongreachCache": (
        "batch_repeat_interleave", "batch_select_indices", "can_drop", "column_mask", "copy", "crop", "empty",
        "get_seq_length", "padded", "rollback", "save", "select",
    ),
}  # fmt: skip


def rest() -> tuple[str, ...]:
    """Names that PARTS does not have: the methods."""
    named = {name for names in PARTS.values() for name in names}
    return tuple(name for name in longreach._NAMES if name not in named)


def page() -> str:
    lines = [HEAD]
    for title, names in PARTS.items():
        lines.append(f"## {title}\n")
        for name in names or rest():
            lines += entry(name, RESULTS.get(name) or attrgetter(name)(longreach))
    return "\n".join(lines).rstrip() + "\n"


def entry(name: str, thing: Any) -> Iterator[str]:
    yield f"### {name}\n"
    yield f"```python\n{signature(name, thing)}\n```\n"
    yield f"{text(thing)}\n"
    if inspect.isclass(thing):
        for member, found in inspect.getmembers_static(thing):
            own = member in vars(thing) or member in MEMBERS.get(name, ())  # of a base class too, where it is named
            own = own and not member.startswith("_") and inspect.getdoc(getattr(thing, member))
            own = own and member in MEMBERS.get(name, (member,))
            if own and callable(getattr(thing, member)) and not isinstance(found, type):
                told = signature(member, getattr(thing, member))
                yield f"* `{told}`: {first_line(getattr(thing, member))}"
            elif own and isinstance(found, property):
                yield f"* `{member}`: {first_line(found)}"
        yield ""


def signature(name: str, thing: Any) -> str:
    """As code. Types without their packages."""
    try:
        found = inspect.signature(thing)
    except ValueError:  # an exception's
        return name
    parts, kinds = list[str](), set[Any]()
    for parameter in found.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not kinds & {parameter.VAR_POSITIONAL, parameter.KEYWORD_ONLY}:
            parts.append("*")
        kinds.add(parameter.kind)
        if parameter.name != "self":
            parts.append(_parameter(parameter))
    result = "" if found.return_annotation in (found.empty, None, "None") else f" -> {_type(found.return_annotation)}"
    return f"{name}({', '.join(parts)}){result}"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    told = f"{stars}{parameter.name}"
    if parameter.annotation is not parameter.empty:
        told += f": {_type(parameter.annotation)}"
    if parameter.default is parameter.empty:
        return told
    default = "..." if repr(parameter.default).startswith("<") else repr(parameter.default).replace("'", '"')
    return f"{told} = {default}" if ": " in told else f"{told}={default}"


def _type(annotation: Any) -> str:
    plain = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=\w)", "", plain)


def text(thing: Any) -> str:
    """A docstring, its indented blocks as lists of terms stay as they are."""
    return (inspect.getdoc(thing) or "").strip()


def first_line(thing: Any) -> str:
    return " ".join(text(thing).split("\n\n")[0].split())


if __name__ == "__main__":
    PAGE.write_text(page())
