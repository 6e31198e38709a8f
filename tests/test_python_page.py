"""The blocks of docs/python.md run, in order."""

from __future__ import annotations

import re
from typing import Any

from tests.doc_tables import ROOT

PAGE = (ROOT / "docs" / "python.md").read_text()


def test_its_blocks_run() -> None:
    blocks, names = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL), dict[str, Any]()
    assert len(blocks) == 13
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)
    assert 0 < names["report"].fraction("decode") < 0.6
    assert names["made"].tokens.shape[1] <= 8 and names["reply"].reused_tokens > 0
    assert names["branches"].tokens[0].tolist() == names["alone"].tokens[0].tolist()
    assert names["first"].text == names["second"].text and names["second"].reused_tokens > 100
    assert {"dense", "quest k=0.2"} < set(names["record"]["methods"])
    assert set(names["found"]["results"]) == {"dense", "quest k=0.2"} and names["one"].label == "loki k=0.2"
    assert names["plan"].kind == "loki" and names["plan"].made.tokens == 1024
    assert (
        names["share"] < 0.2
        and 0.45 < names["half"] < 0.55
        and names["halved"].shape[1] <= names["inputs"].input_ids.shape[1] + 4
    )
