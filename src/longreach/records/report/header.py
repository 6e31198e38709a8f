"""The head of a report: models, code and machines, with warnings for results that cannot be repeated or compared."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from longreach.records.report.blocks import Block, Heading, Text, table
from longreach.records.report.format import number, setting
from longreach.records.report.reading import Record

# facts that must agree for numbers of several records to be comparable
COMPARED = ("model", "weights (sha256)", "dtype", "commit", "device", "threads", "python")


def header(records: Sequence[Record]) -> list[Block]:
    """Title, warnings, a table of facts that all records share, and a table of facts that differ."""
    models = list(dict.fromkeys(r["model"]["name"] for r in records))
    title = Heading(1, f"Report: {', '.join(models)}")
    facts = [properties(r) for r in records]
    names = list(dict.fromkeys(name for f in facts for name in f))
    shared = [n for n in names if len({f.get(n) for f in facts}) == 1]
    differ = [n for n in names if n not in shared]
    kinds = {kind: [r.name for r in records if r.kind == kind] for kind in dict.fromkeys(r.kind for r in records)}
    what = "; ".join(f"{kind}: {', '.join(files)}" for kind, files in kinds.items())
    about = "What all records share" if len(records) > 1 else "What was measured"
    rows = [["records", what], *([name, facts[0][name]] for name in shared)]
    blocks: list[Block] = [title, *(Text(w, loud=True) for w in warnings(records)), table(about, ("", ""), rows, 2)]
    if differ:
        rows = [[r.name, *(f.get(name, "-") for name in differ)] for r, f in zip(records, facts, strict=True)]
        blocks.append(table("What they differ in", ("record", *differ), rows, texts=1 + len(differ)))
    return blocks


def properties(record: Record) -> dict[str, str]:
    """A record's model, code and machine, as text."""
    model, device = record["model"], record["device"]
    dirty = " (dirty: with changes that are in no commit)" if record["dirty"] else ""
    return {
        "model": model["name"],
        "weights (sha256)": model["sha256"],
        "dtype": model["dtype"],
        "parameters": f"{model['parameters']:,}",
        "context": f"{setting(model['context'])} tokens",
        **({"length": f"{', '.join(map(str, record.lengths))} tokens"} if record.lengths else {}),
        "commit": f"{record['commit'] or 'none named'}{dirty}",
        "device": f"{device['name']} ({device['type']})",
        "threads": number(device["threads"]),
        "python": record["python"],
        **{name: setting(version) for name, version in record["versions"].items()},
    }


def warnings(records: Sequence[Record]) -> Iterator[str]:
    """Warnings that precede all numbers."""
    for record in records:
        if record["dirty"]:
            commit = _short(record["commit"] or "an unknown commit")
            yield (
                f"{record.name} was measured from a DIRTY tree at {commit}: the commit does not say what ran. Commit, "
                f"then measure it again before you rely on it."
            )
        elif not record["commit"]:
            yield f"{record.name} names no commit: what code was measured is not known."
    facts = [properties(record) for record in records]
    for name in COMPARED:
        found = list(dict.fromkeys(f[name] for f in facts))
        if len(found) > 1:
            yield f"The records differ in {name}: {'; '.join(_short(f) for f in found)}."
    versions = {name for record in records for name in record["versions"]}
    apart = sorted(name for name in versions if len({f.get(name) for f in facts}) > 1)
    if apart:
        yield f"The records differ in versions of {', '.join(apart)}."


def _short(text: str) -> str:
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{28,52}\b", r"\1", text)
