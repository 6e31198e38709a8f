"""Answers of an engine on two ranks, as JSON: `python -m tests.adapters.vllm.two_ranks DECODE IDS`.

A program of its own, as vLLM starts its ranks as processes.
"""

from __future__ import annotations

import json
import os
import sys

if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import longreach
    from tests.adapters.vllm.engines import answers, engine

    decode, ids = sys.argv[1], json.loads(sys.argv[2])
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "max_model_len": 2048}
    with engine(decode, **options) as llm:
        found = answers(llm, ids)
        report = longreach.vllm.report(llm).to_json()
    print(json.dumps({"answers": found, "report": report}))
