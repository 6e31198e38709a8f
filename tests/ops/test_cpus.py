"""Decoding on a CPU where something is missing: AVX2, or Numba; and by two threads at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from longreach import MagicPIG
from longreach.ops import attend
from longreach.ops.simhash import collide, weigh
from tests.methods.drive import Turn, in_phase, new_cache, outputs, run, text
from tests.ops.simhash.cases import hashed

METHOD = MagicPIG(bits=4, tables=9, local=8, seal=8, centre=40, dense_layers=())


def sampled(path: Path) -> None:
    """The keys, weights and results of Numba's kernels, written to a file. Also run in another process."""
    found = dict[str, Any]()
    for dtype in (torch.bfloat16, torch.float16):
        case = hashed([200, 77], dtype=dtype, size=64, impl="numba")
        got = collide(case.rows, case.tables, case.queries, capacity=200, impl="numba")
        weight = weigh(case.rows, case.kv, case.tables, got, case.centre, impl="numba").log_weight
        used = torch.arange(got.index.shape[2]) < got.count[..., None]
        whole = attend(case.rows, case.kv, got.lists(torch.where(used, weight, 0.0)), scale=0.25, impl="numba")
        found[str(dtype)] = {
            "count": got.count, "keys": torch.where(used, got.index, 0), "met": torch.where(used, got.met, 0),
            "weight": torch.where(used, weight, 0.0), "out": whole.out, "lse": whole.lse,
        }  # fmt: skip
    torch.save(found, path)


def test_a_cpu_without_avx2(tmp_path: Path) -> None:
    """Kernels compiled for any CPU of its kind choose the same keys, and compute the same up to rounding."""
    pytest.importorskip("numba")
    sampled(tmp_path / "here")
    code = (
        f"from pathlib import Path; from tests.ops.test_cpus import sampled; sampled(Path({str(tmp_path / 'there')!r}))"
    )
    changed = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    _python(code, **changed)
    here, there = (torch.load(tmp_path / name) for name in ("here", "there"))
    for dtype, mine in here.items():
        for name in ("count", "keys", "met"):
            assert torch.equal(mine[name], there[dtype][name]), name
        for name in ("weight", "out", "lse"):
            torch.testing.assert_close(there[dtype][name], mine[name], rtol=1e-5, atol=1e-5)
    assert any(x.name.endswith(".nbc") for x in (tmp_path / "cache").rglob("*")), "they were compiled for that CPU"


def test_two_sessions_in_two_threads() -> None:
    """Each gives what it gives alone, with kernels that run in threads of their own."""
    texts = [text(100, seed=seed) for seed in (3, 4)]

    def decode(whole: Any) -> torch.Tensor:
        cache = new_cache()
        run(cache, in_phase(METHOD, "prefill"), [Turn(whole, 0, 60)], phase="prefill")
        return outputs([run(cache, METHOD, [Turn(whole, 0)], phase="decode") for _ in range(30)])

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        want = [decode(whole) for whole in texts]
        together, found, failed = threading.Barrier(2), dict[int, torch.Tensor](), list[BaseException]()

        def work(number: int) -> None:
            try:
                torch.set_num_threads(2)
                together.wait()
                found[number] = decode(texts[number])
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch.set_num_threads(before)
    assert not failed
    for number, alone in enumerate(want):
        torch.testing.assert_close(found[number], alone, rtol=0, atol=2e-5)


WITHOUT = """
import json, sys, warnings
sys.modules["numba"] = sys.modules["llvmlite"] = None
import torch
import longreach
from longreach.errors import Unsupported
from longreach.testing.tiny import random_tokens, tiny_model
model, method = tiny_model("llama"), longreach.MagicPIG(bits=4, tables=9, local=8, seal=8, centre=40, dense_layers=())
with warnings.catch_warnings(record=True) as seen, longreach.attach(model, decode=method) as session:
    warnings.simplefilter("always")
    longreach.generate(session, random_tokens(1, 60), max_new_tokens=4, eos_token_id=())
    ran = sorted({layer.impl for layer in session.report().layers})
try:
    with longreach.attach(model, decode=method, impl="numba"):
        refused = ""
except Unsupported as error:
    refused = str(error)
said = [str(w.message) for w in seen if "longreach" in str(w.message)]
print(json.dumps({"ran": ran, "said": said, "refused": refused}))
"""


def test_without_numba() -> None:
    """The reference computes, the report names it, and one warning names the extra."""
    found = json.loads(_python(WITHOUT).splitlines()[-1])
    assert found["ran"] == ["reference"]
    (said,) = found["said"]
    assert "reference implementations on this CPU" in said and "pip install 'longreach[cpu]'" in said
    assert "needs Numba" in found["refused"] and "pip install 'longreach[cpu]'" in found["refused"]


def _python(code: str, **changed: str) -> str:
    """What a process prints that runs the code in this checkout."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, str(Path(root) / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root,
        env={**os.environ, "PYTHONPATH": path, **changed},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
