"""Kascade's measurements of a model, from attention weights pooled over tiles (Kascade, sections 3.3 to 3.5).

Pure functions of captured tensors, and one streaming sum: it keeps the top-k sets of a layer's tiles until the later
layers have passed, never the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longreach.methods.call import LayerCall
from longreach.ops import reference_chunks
from longreach.ops.pooled_scores import pooled_scores
from longreach.ops.types import Logits

K = 64  # keys of a tile; layers are compared by the weight on them
TILE = 128  # query rows of a tile, the query heads of a KV head counted


def tile_tokens(tile: int, group: int) -> int:
    """Tokens of a tile of `tile` query rows. group: query heads of a KV head. Tiles begin at position 0."""
    return max(1, tile // group)


def tokens_needed(k: int, tile: int, group: int) -> int:
    """The fewest tokens of a prompt with more than k keys before some tile; with fewer all choices are equal."""
    tokens = tile_tokens(tile, group)
    return (k // tokens + 1) * tokens + 1


class TileSimilarity:
    """Share of the weight of one prompt's tiles that lies on keys chosen in earlier layers.

    layers, heads: of the model (KV heads). k: keys a tile chooses. tokens: of a tile. Passes over the prompt begin
    with `start` and go through the layers in ascending order; in each pass every layer gets the same blocks of tiles.
    """

    def __init__(self, layers: int, heads: int, k: int, tokens: int, device: torch.device | str = "cpu"):
        self.k, self.tokens = k, tokens
        self._least = torch.ones(layers, heads, layers, heads, device=device)
        self._chosen: dict[int, list[Tensor]] = {}

    def start(self) -> None:
        """The next tiles of the prompt are coming."""
        self._chosen = {}

    def add(self, layer: int, pooled: Tensor, before: Tensor) -> None:
        """The next block of tiles of a layer.

        pooled: fp32 [t, G, n], weights after the softmax summed over a tile's rows and the query heads of a KV head; it
        is overwritten. before: int [t], the keys before each tile, more than k of them.
        """
        mine = self._chosen.setdefault(layer, [])
        block = len(mine)
        own = own_mass(pooled, before, self.tokens)  # [t, G]
        slots = torch.arange(pooled.shape[-1], device=pooled.device)
        pooled.masked_fill_((slots >= before[:, None])[:, None], 0.0)
        top = pooled.topk(self.k, -1)
        mine.append(top.indices.int())
        most = top.values.sum(-1) + own
        chosen = torch.cat([blocks[block] for blocks in self._chosen.values()], 1)  # [t, layers x heads, k]
        found = mass_on(pooled, chosen) + own[:, None]
        share = (found / most[:, None]).clamp(max=1.0).amin(0).unflatten(0, (len(self._chosen), -1))
        others = torch.tensor(list(self._chosen), device=pooled.device)
        self._least[others, :, layer] = torch.minimum(self._least[others, :, layer], share)

    def finish(self) -> Tensor:
        """fp32 [L, G, L, G]: keys chosen in (layer, head), for (layer, head): the least share over the tiles.

        The weight found on the chosen keys, over that on the tile's own best k keys; both include the tile itself,
        which is always attended to. 1 where nothing was compared: for layers before the choosing one, and layers that
        were not added.
        """
        return self._least


def own_mass(pooled: Tensor, before: Tensor, tokens: int) -> Tensor:
    """Sum of pooled weights [t, G, n] on the `tokens` keys from before[t] on: [t, G]."""
    at = before[:, None] + torch.arange(tokens, device=pooled.device)
    inside = at < pooled.shape[-1]  # the last tile of a text may be cut short
    index = at.clamp(max=pooled.shape[-1] - 1)[:, None].expand(-1, pooled.shape[1], -1)
    return (pooled.gather(-1, index) * inside[:, None]).sum(-1)


def mass_on(pooled: Tensor, chosen: Tensor) -> Tensor:
    """Sum of each head's weights [t, G, n] on the keys that each head of a layer chose [t, A, k]: [t, A, G]."""
    heads, others = pooled.shape[1], chosen.shape[1]
    index = chosen.long()[:, :, None].expand(-1, -1, heads, -1)
    return pooled[:, None].expand(-1, others, -1, -1).gather(-1, index).sum(-1)


def change(x: Tensor, out: Tensor) -> Tensor:
    """1 - cos(x, x + out) [R]: how much a layer's attention `out` [R, width] turns the residual stream x before it."""
    before = x.float()
    return 1 - torch.nn.functional.cosine_similarity(before, before + out.float(), dim=-1)


def pooled_over_tiles(
    call: LayerCall, lse: Tensor, before: Tensor, tokens: int, logits: Logits | None = None
) -> Tensor:
    """fp32 [t, G, n]: weights after the softmax, summed over the rows of each tile and the query heads of a KV head.

    call: rows of one sequence, in neighbouring tiles of `tokens` tokens. lse: fp32 [R, H] of dense attention.
    before: int [t], the keys before each tile. n: the view's capacity; slots past a tile's last row are 0.
    logits: those that `score_keys` left with the lse; without them the keys are read again.
    """
    tile = (call.rows.pos.long() - before[0]) // tokens
    given = {"lse": lse, "logits": logits, "tile": tile, "tiles": len(before)}
    return pooled_scores(call.rows, call.kv, scale=call.scale, softcap=call.softcap, **given)  # type: ignore[arg-type]


MOST = 1 << 24  # pooled scores in memory at a time


def block_tiles(heads: int, keys: int) -> int:
    """Tiles whose scores are held at a time: as many as make up MOST numbers, but one at least."""
    return max(1, MOST // (heads * keys))


def memory(
    layers: int, heads: int, group: int, keys: int, *, k: int, tokens: int, chunk: int, width: int, head_dim: int
) -> int:
    """Bytes that calibration holds at most, in addition to the model's own for a dense prefill.

    heads: KV heads, of `group` query heads each; keys: tokens of a prompt; chunk: those of a pass, tokens: of a tile;
    width: channels of the residual stream. In the order of the sum: pooled scores of one block of tiles, and what
    making them takes (the block's queries; logits of a few rows, several times over; keys in fp32); the top-k sets of
    all layers for the tiles of a pass, and one block's lookups in all of them; the shares of a prompt; the residual
    stream of a pass in fp32, several times over.
    """
    tiles = -(-chunk // tokens)
    block = min(tiles, block_tiles(heads, keys))
    scores = 4 * block * heads * keys
    queries = 2 * 4 * block * tokens * heads * group * head_dim
    logits = 5 * 4 * max(reference_chunks.SCORES_AT_ONCE, heads * group * keys)
    in_fp32 = 4 * heads * keys * head_dim
    sets = 4 * layers * tiles * heads * k + 4 * layers * block * heads * k * (3 + 2 * heads)
    return scores + queries + logits + in_fp32 + sets + 2 * 4 * (layers * heads) ** 2 + 6 * 4 * chunk * width
