"""Answers of an engine in processes of its own, as JSON: `python -m tests.adapters.vllm.processes DECODE RANKS IDS`.

A program of its own, as vLLM starts its engine and its ranks as processes.
"""

from __future__ import annotations

import json
import os
import sys

if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    import longreach
    from tests.adapters.vllm.engines import answers, engine

    decode, ranks, ids = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    options = {"distributed_executor_backend": "mp"} if ranks > 1 else {}
    with engine(decode, tensor_parallel_size=ranks, max_model_len=2048, **options) as llm:
        found = answers(llm, ids)
        report = longreach.vllm.report(llm).to_json()
    print(json.dumps({"answers": found, "report": report}))
