"""Sessions that decode at the same time, each in a thread of its own."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from longreach import MagicPIG, attach
from longreach.testing.tiny import tiny_model
from tests.adapters.transformers.reference import prompt

METHOD = MagicPIG(bits=3, tables=9, local=8, seal=4, centre=16, dense_layers=())


def test_two_sessions_give_the_tokens_of_each_alone() -> None:
    """The kernels of both run on the same threads of the process."""
    pytest.importorskip("numba")
    models, prompts = [tiny_model("llama", seed=n) for n in range(2)], [prompt(80, seed=n) for n in range(2)]
    threads, interval = torch.get_num_threads(), sys.getswitchinterval()
    start, got, used = threading.Barrier(2), dict[int, torch.Tensor](), set[str]()

    def tokens(n: int) -> torch.Tensor:
        torch.set_num_threads(2)
        return models[n].generate(prompts[n], max_new_tokens=24, do_sample=False)[0, prompts[n].shape[1] :]

    def work(n: int) -> None:
        start.wait()
        got[n] = tokens(n)

    try:
        with attach(models[0], decode=METHOD) as first, attach(models[1], decode=METHOD) as second:
            want = [tokens(n) for n in range(2)]
            for session in (first, second):
                session.on_layer = lambda phase, call, outcome: used.update(call.meter.kernels_used)
            sys.setswitchinterval(1e-5)
            workers = [threading.Thread(target=work, args=(n,)) for n in range(2)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
    finally:
        sys.setswitchinterval(interval)
        torch.set_num_threads(threads)
    assert [got[n].tolist() for n in range(2)] == [x.tolist() for x in want]
    assert len(set(want[0].tolist())) > 5 and "numba" in used
