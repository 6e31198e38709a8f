"""Shares of bytes, against bytes counted by hand."""

from __future__ import annotations

import pytest
import torch

from longreach import attach
from longreach.evals.read_shares import ReadShares
from longreach.methods.call import Phase
from longreach.runtime import LayerReport, Report
from longreach.testing.tiny import random_tokens, tiny_model


def test_shares_are_bytes_over_dense_bytes() -> None:
    with attach(tiny_model("llama"), decode="oracle_top_k") as session:
        assert ReadShares.of(session.report(), "decode") is None
        cache = session.new_cache()
        tokens = random_tokens(1, 40)
        with torch.no_grad():
            session.model(input_ids=tokens, past_key_values=cache, use_cache=True)
            session.model(input_ids=tokens[:, :1], past_key_values=cache, use_cache=True)
        prefill, decode = (ReadShares.of(session.report(), phase) for phase in ("prefill", "decode"))
        assert decode and decode.total == session.report().fraction("decode")
    assert prefill == ReadShares(1.0, 0.5, 0.5, 0.0)
    # 41 keys: all scored twice, then a tenth of them, rounded up, attended to; the same tenth of the values
    assert decode.keys == pytest.approx((2 * 41 + 5) / 82) and decode.values == pytest.approx(5 / 82)
    assert decode.metadata == pytest.approx(5 * 4 / (82 * 16 * 4))  # its list: int32 entries beside fp32 [16] vectors


def test_all_layers_of_a_phase_count_by_their_bytes_metadata_too() -> None:
    def layer(phase: Phase, *sizes: int) -> LayerReport:
        return LayerReport(phase, 0, "any", "reference", 1, 1, *sizes, overflowed_lists=0, dense_reasons=())

    report = Report((layer("decode", 30, 10, 4, 100), layer("decode", 90, 0, 6, 300), layer("prefill", 9, 9, 9, 18)))
    found = ReadShares.of(report, "decode")
    assert found == ReadShares(total=0.35, keys=0.3, values=0.025, metadata=0.025)
    assert report.fraction("decode") == 0.35
