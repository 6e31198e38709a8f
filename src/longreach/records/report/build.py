"""From records to the blocks of a report."""

from __future__ import annotations

from collections.abc import Sequence

from longreach.records.report.answers import failures, wrong
from longreach.records.report.attention import attention
from longreach.records.report.blocks import Block, Heading, Text
from longreach.records.report.budget_curves import budget_curves
from longreach.records.report.depth import depths
from longreach.records.report.fidelity import fidelity
from longreach.records.report.fused import fused
from longreach.records.report.fusion import fusion
from longreach.records.report.header import header
from longreach.records.report.parts import parts
from longreach.records.report.perplexity import perplexity
from longreach.records.report.reading import Record
from longreach.records.report.repeat import repeat
from longreach.records.report.reused import reused
from longreach.records.report.routing import routing
from longreach.records.report.rows import groups
from longreach.records.report.sampling import sampling
from longreach.records.report.scores import scores


def build(records: Sequence[Record]) -> list[Block]:
    """All blocks of a report in reading order. Picture names are unique."""
    blocks = header(records)
    evaluations = groups(records)
    for number, group in enumerate(evaluations, 1):
        file = f"eval{f'-{number}' if len(evaluations) > 1 else ''}"
        names = [r.name for r in group.records]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        of = f" ({names[0]}{more})" if len(evaluations) > 1 else ""
        blocks.append(Heading(2, f"Tasks: {group.title}{of}"))
        if len(evaluations) > 1:
            blocks.append(Text(f"From {', '.join(names)}. Records stand in one table where "
                               f"model, methods, seed and way of drawing are the same."))  # fmt: skip
        blocks += [*scores(group, file), *budget_curves(group, file), *fused(group, file), *parts(group),
                   *depths(group, file), *reused(group, file)]  # fmt: skip
    sections = (("perplexity", "Perplexity", perplexity), ("fidelity", "Fidelity", fidelity),
                ("attention", "Attention", attention), ("fusion", "Fusion", fusion),
                ("sampling", "Sampling", sampling), ("mka routing", "Routing", routing))  # fmt: skip
    for kind, title, section in sections:
        chosen = [r for r in records if r.kind == kind]
        for number, record in enumerate(chosen, 1):
            length = f", {record.lengths[0]} tokens" if record.lengths else ""
            of = f" ({record.name})" if len(chosen) > 1 else ""
            blocks.append(Heading(2, f"{title}: {record['model']['name']} ({record['model']['dtype']}){length}{of}"))
            blocks += section(record, f"{kind.replace(' ', '-')}{f'-{number}' if len(chosen) > 1 else ''}")
    if evaluations:
        blocks += [Heading(2, "Failed samples"), *failures(evaluations)]
        blocks += [Heading(2, "Wrong answers"), Text(
            "A few answers of each task and method, the worst first. Look at them before you trust a score: a right "
            "answer in other words counts as wrong, a lucky one as right."
        )]  # fmt: skip
        for group in evaluations:
            if len(evaluations) > 1:
                blocks.append(Heading(3, group.title))
            blocks += wrong(group)
    return [*blocks, Heading(2, "How to repeat"), *repeat(records)]
