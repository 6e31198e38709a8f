"""Shares of bytes, against bytes counted by hand."""

from __future__ import annotations

import pytest
import torch

from longreach import attach
from longreach.evals.reads import Reads
from longreach.testing.tiny import random_tokens, tiny_model


def test_shares_are_bytes_over_dense_bytes() -> None:
    with attach(tiny_model("llama"), decode="oracle_top_k") as session:
        assert Reads.of(session.report(), "decode") is None
        cache = session.new_cache()
        tokens = random_tokens(1, 40)
        with torch.no_grad():
            session.model(input_ids=tokens, past_key_values=cache, use_cache=True)
            session.model(input_ids=tokens[:, :1], past_key_values=cache, use_cache=True)
        prefill, decode = (Reads.of(session.report(), phase) for phase in ("prefill", "decode"))
        assert decode and decode.total == session.report().fraction("decode")
    assert prefill == Reads(1.0, 0.5, 0.5, 0.0)
    # 41 keys: all scored twice, then a tenth of them, rounded up, attended to; the same tenth of the values
    assert decode.keys == pytest.approx((2 * 41 + 5) / 82) and decode.values == pytest.approx(5 / 82)
    assert decode.metadata == 0.0
