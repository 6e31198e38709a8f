"""The control."""

from __future__ import annotations

import pytest
import torch

from longreach.cache import CacheConfig
from longreach.methods.dense import Dense
from tests.methods.drive import CACHES, read_text, slots_read, text
from tests.methods.metered import metadata_of
from tests.methods.one_layer import Layers


def test_every_row_reads_all_it_can_see_once() -> None:
    for turn in read_text(Dense(), text(12), chunks=[4, 5]):
        for call, outcome in zip(turn.calls, turn.outcomes, strict=True):
            (keys,), (values,) = call.meter.keys, call.meter.values
            seen = torch.arange(int(call.kv.seq_lens[0])) <= call.rows.pos[:, None]
            assert torch.equal(slots_read(call, [keys]), seen[:, None].expand(-1, 2, -1)) and keys is values
            assert metadata_of(call) == ([0] * len(call.rows.pos), 0) and outcome.dense_reason is None


@pytest.mark.parametrize("config", CACHES.values(), ids=CACHES)
def test_after_eviction_it_is_attention_over_the_kept_keys(config: CacheConfig) -> None:
    """Other keys in each head, held against keys and values as they once came in, not against what memory holds."""
    layers = Layers(Dense(), config=config)
    k, v = layers.random(40, 2, 16), layers.random(40, 2, 16)
    layers.read([0], [4])
    layers.read([1], [40], k=k, v=v)
    kept = layers.keep(0, 1, 15)
    for _ in range(4):
        new_k, new_v, q = layers.random(2, 2, 16), layers.random(2, 2, 16), layers.random(2, 4, 16)
        ((call, outcome),) = layers.decode([0, 1], q=q, k=new_k, v=new_v)
        k, v = torch.cat([k, new_k[1:]]), torch.cat([v, new_v[1:]])
        kept = torch.cat([kept, torch.full((2, 1), len(k) - 1)], 1)
        assert call.evicted and call.rows.pos[1] == kept.shape[1] - 1
        for head in range(4):
            mine = kept[head // 2]
            p = (k[mine, head // 2].double() @ q[1, head].double() * call.scale).softmax(0)
            want = p @ v[mine, head // 2].double()
            torch.testing.assert_close(outcome.partial.out[1, head].double(), want, rtol=0, atol=1e-6)
