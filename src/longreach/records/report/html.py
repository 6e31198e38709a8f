"""A report as one self-contained HTML page, with embedded pictures and without scripts."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path

from longreach.records.report.blocks import SIGNS, Block, Cell, Code, Figure, Heading, Table, Text
from longreach.records.report.format import one_line

STYLE = Path(__file__).with_name("page.css")
# nothing is loaded and nothing runs, even if a model's answer contains markup
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def html(blocks: Sequence[Block]) -> str:
    """The whole page."""
    title = next((block.text for block in blocks if isinstance(block, Heading)), "Report")
    parts = {n: f"part-{n}" for n, b in enumerate(blocks) if isinstance(b, Heading) and b.level == 2}
    links = "".join(f'<li><a href="#{parts[n]}">{shown(blocks[n].text)}</a></li>' for n in parts)  # type: ignore[union-attr]
    body = "\n".join(_block(block, parts.get(n)) for n, block in enumerate(blocks))
    body = body.replace("</h1>", f"</h1>\n<nav><ul>{links}</ul></nav>", 1)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{shown(title)}</title>
<style>
{STYLE.read_text(encoding="utf-8").strip()}
</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def shown(text: str) -> str:
    """Text, escaped for use between tags and in attributes."""
    return escape(one_line(text), quote=True)


def _block(block: Block, anchor: str | None) -> str:
    match block:
        case Heading(level, text):
            place = f' id="{anchor}"' if anchor else ""
            return f"<h{level}{place}>{shown(text)}</h{level}>"
        case Text(text, loud):
            return f'<p class="loud" role="alert">{shown(text)}</p>' if loud else f"<p>{shown(text)}</p>"
        case Figure(_, png, caption):
            source = f"data:image/png;base64,{b64encode(png).decode('ascii')}"
            return (
                f'<figure><div class="wide"><img src="{source}" alt="{shown(caption)}"></div>'
                f"<figcaption>{shown(caption)}</figcaption></figure>"
            )
        case Code(text):
            lines = "\n".join(shown(line) for line in text.split("\n"))
            return f"<pre><code>{lines}</code></pre>"
        case Table():
            return _table(block)


def _table(block: Table) -> str:
    kinds = ["word" if n < block.texts else "number" for n in range(len(block.head))]
    head = "".join(
        f'<th scope="col" class="{k}">{_breakable(text)}</th>' for text, k in zip(block.head, kinds, strict=True)
    )
    rows = "\n".join(
        f"<tr>{''.join(_cell(cell, kind) for cell, kind in zip(row, kinds, strict=True))}</tr>" for row in block.rows
    )
    grid = f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>'
    if block.folded:
        return f"<details><summary>{shown(block.title)}</summary>{grid}</details>"
    return f"<h3>{shown(block.title)}</h3>\n{grid}" if block.title else grid


def _breakable(text: str) -> str:
    """A column's name, with line breaks allowed between its words."""
    return re.sub(r"([_/=])", r"\1<wbr>", shown(text))


def _cell(cell: Cell, kind: str) -> str:
    note = f" <small>{shown(cell.note)}</small>" if cell.note else ""
    sign = f' <b title="{cell.mark} than dense">{SIGNS[cell.mark]}</b>' if cell.mark else ""
    return f'<td class="{kind} {cell.mark}">{shown(cell.text)}{sign}{note}</td>'.replace(f'{kind} "', f'{kind}"', 1)
