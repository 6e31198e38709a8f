"""Engines in processes of their own, of one rank and of two tensor-parallel ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import longreach
from tests.adapters.vllm.engines import NEW, answers, engine, expected, prompts

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).parents[3]


def run(decode: str, ranks: int, ids: list[list[int]]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.adapters.vllm.processes", decode, str(ranks), json.dumps(ids)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)


@pytest.mark.parametrize(
    ("decode", "ranks"),
    [("kascade", 1), *((name, 2) for name in ("streaming_llm", "kascade heads=all", "omnikv", "quest dense_layers=[0]",
                                              "loki"))],
)  # fmt: skip
def test_they_answer_as_one_process(decode: str, ranks: int) -> None:
    ids = prompts(3000, 1200, 300)
    done = run(decode, ranks, ids)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["answers"] == expected(decode, ids)
    with engine(decode, max_model_len=2048) as llm:
        answers(llm, ids)
        single = longreach.vllm.report(llm).to_json()
    assert found["report"]["decode"] == pytest.approx(single["decode"], rel=0.02)
    for both, one in zip(found["report"]["layers"], single["layers"], strict=True):
        assert both["rows"] == one["rows"] and both["dense_bytes"] == one["dense_bytes"]
        assert both["phase"] == "prefill" or both["rows"] == len(ids) * (NEW - 1)


def test_a_head_map_that_crosses_ranks_is_refused() -> None:
    done = run("kascade", 2, prompts(300))
    assert done.returncode != 0
    assert "use heads='all', which makes one choice for all ranks" in done.stderr + done.stdout
