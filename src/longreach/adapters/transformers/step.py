"""One forward pass of a transformers model: its real tokens, their places in the cache, and its methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from longreach.adapters.transformers.rotary import Rotation
from longreach.adapters.transformers.shard import shard_of
from longreach.cache import Append, KVCache, Placement
from longreach.errors import CalledOutside
from longreach.methods.call import ModelShape
from longreach.ops import HeadShard, KVView, RotaryFrequencies
from longreach.ops.types import RowRange
from longreach.runtime import Pass, StateStore


class RecurrentPass(Protocol):
    """The state of a hybrid model's recurrent layers, as a pass uses it."""

    @property
    def begun(self) -> bool: ...

    def begin(self, real: Tensor | None, width: int) -> None: ...

    def commit(self, added: Sequence[int]) -> None: ...


class PassCache(Protocol):
    """A cache as a pass uses it. columns: those it holds, padding included; seen: those reported to the model.

    recurrent: None where no layer keeps a recurrent state.
    """

    kv: KVCache
    states: StateStore
    columns: int

    @property
    def seen(self) -> int: ...

    @property
    def recurrent(self) -> RecurrentPass | None: ...

    def commit(self, step: Step) -> None: ...

    def abandon(self, step: Step) -> None: ...


@dataclass
class ModelFacts:
    """Facts about a session's model, kept between passes.

    cache_windows: layer -> window beyond which transformers' own cache would forget keys. checked: layers whose
    attention formula was checked. rotations: how each layer rotates, or why that is unknown. shape: for methods.
    decoder: the model's. layer_types: of its layers, if they differ. frequencies: by which layers rotate, once needed.
    modules: each layer's attention module and its parent, for fusion; None until they are looked for. shards: which KV
    heads this rank holds of each layer, for layers that have run or were asked. numbers: the model's number of each
    layer that attends -> its number here, for a hybrid model; None where all attend. continued: () until it was found
    whether recurrent layers continue a text in a pass of several tokens, then the reason why not, else None. latent:
    whether layers cache one vector a token (MLA).
    """

    shape: ModelShape
    cache_windows: dict[int, int] = field(default_factory=dict)
    checked: set[int] = field(default_factory=set)
    rotations: dict[int, Rotation | str] = field(default_factory=dict)
    decoder: nn.Module | None = None
    layer_types: tuple[str, ...] | None = None
    frequencies: dict[int, RotaryFrequencies] = field(default_factory=dict)
    modules: tuple[list[nn.Module], list[nn.Module]] | None = None
    shards: dict[int, HeadShard] = field(default_factory=dict)
    numbers: dict[int, int] | None = None
    continued: tuple[str | None, ...] = ()
    latent: bool = False

    @property
    def hybrid(self) -> bool:
        """Whether some layers keep a recurrent state."""
        return self.numbers is not None

    def layer(self, layer_idx: int) -> int:
        """The number of a layer among those that attend. layer_idx: the model's; one that does not attend gives -1."""
        return layer_idx if self.numbers is None else self.numbers.get(layer_idx, -1)

    def shard(self, layer: int, module: nn.Module, kv_heads: int) -> HeadShard:
        """The shard of a layer whose keys arrive with `kv_heads` heads on this rank. Raises as shard_of."""
        if layer not in self.shards:
            self.shards[layer] = shard_of(module, kv_heads)
        return self.shards[layer]


@dataclass
class Step:
    """The running forward pass, as attention needs it.

    layers: who attends, observes and counts. facts: of the model. shape: (B, T) of the pass. real: bool [B, T], the
    tokens that are not padding, None if all are. append: where they go. cache: the cache they go to, None for a pass
    without one. rotary: (cos, sin) of each layer, for methods that need queries before rotation. written: key and
    value that a layer has put into the cache, until it attends. whole: the append of all tokens, where only some of
    them run from some layer on (`narrow`); None while all do. static: one of a run of steps over fixed buffers, which
    the decode loop commits and counts. packed: tokens of each sequence of a pass that has them one behind the other in
    a single row of the model, shape (1, T); None where each sequence has a row. cut: set while the decode loop records
    the step in pieces: it runs attention between two graphs, now and at each replay, and returns its result in a fixed
    buffer of the given dtype.
    """

    layers: Pass
    facts: ModelFacts
    shape: tuple[int, int]
    real: Tensor | None
    append: Append
    cache: PassCache | None
    rotary: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    written: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    whole: Append | None = None
    static: bool = False
    packed: tuple[int, ...] | None = None
    cut: Callable[[Callable[[], Tensor], torch.dtype], Tensor] | None = None

    def __post_init__(self) -> None:
        # columns of the pass, however few of them run
        self.width = self.shape[1] if self.packed is None else max(self.packed)

    @property
    def columns(self) -> int:
        """Columns, padding included, filled by the pass and before it."""
        return self.width + (0 if self.cache is None else self.cache.seen)

    def column_mask(self) -> Tensor | None:
        """bool [B, width]: which of the columns that the pass adds to the cache are tokens, None if all are."""
        if self.packed is None or min(self.packed) == self.width:
            return self.real
        return torch.arange(self.width) >= self.width - torch.tensor(self.packed)[:, None]

    def narrow(self, index: Tensor, counts: Sequence[int]) -> None:
        """From here on only the tokens at `index` [r], ascending, of packed sequences run, counts[b] of sequence b; all
        commit."""
        assert self.whole is None and self.packed is not None and self.real is None
        runs = tuple(RowRange(count, seq) for seq, count in enumerate(counts))
        self.whole, self.append, self.shape = self.append, self.append.take(index, runs), (1, len(index))
        self.layers.shared.clear()  # earlier layers' results for later ones belong to other rows

    def rows(self, x: Tensor) -> Tensor:
        """[B, heads, T, D] as the model has it -> the real tokens, packed [R, heads, D]."""
        x = x.transpose(1, 2)
        return x.flatten(0, 1) if self.real is None else x[self.real]

    def rectangle(self, out: Tensor) -> Tensor:
        """[R, H, D] -> [B, T, H, D], zeros for padding."""
        if self.real is None:
            return out.unflatten(0, self.shape)
        real = self.real[..., None, None].expand(*self.shape, *out.shape[1:])
        return out.new_zeros(*self.shape, *out.shape[1:]).masked_scatter(real, out)

    def view_of(self, k: Tensor, v: Tensor) -> KVView:
        """The new tokens alone as a KVView, without a copy where nothing is padded; gradients flow."""
        if self.real is None:
            keys = k.contiguous()
            values = keys if v is k else v.contiguous()
            return KVView(keys, values, self.append.at(0).seq_lens, values_in_keys=v is k)
        batch, length = self.shape

        def packed(x: Tensor) -> Tensor:
            rows = self.rows(x)
            place = (self.append.seq, self.append.pos)
            return rows.new_zeros(batch, length, *rows.shape[1:]).index_put(place, rows).transpose(1, 2)

        keys = packed(k)
        return KVView(keys, keys if v is k else packed(v), self.append.at(0).seq_lens, values_in_keys=v is k)


_STEP: ContextVar[Step | None] = ContextVar("longreach_step", default=None)


@contextmanager
def entered(step: Step) -> Iterator[None]:
    """Within this block, attention belongs to `step`."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def running() -> Step | None:
    """The step of the forward pass we are in; None outside one of an attached model."""
    return _STEP.get()


def current() -> Step:
    """The step of the forward pass we are in."""
    step = _STEP.get()
    if step is None:
        raise CalledOutside(
            "longreach's attention was called outside a forward pass of an attached model: the model is not "
            "attached (another one shares its config?), one of its parts was called alone, or a pass is being "
            "repeated for its gradients; call the whole model inside `with longreach.attach(model):`"
        )
    return step


def plain_append(counts: list[int], device: torch.device) -> Append:
    """Placement of tokens in a pass without a cache: sequence b holds tokens [0, counts[b])."""
    new = torch.tensor(counts, dtype=torch.int64, device=device)
    batch, starts = len(counts), (0,) * len(counts)
    seq = torch.repeat_interleave(torch.arange(batch, device=device), new, output_size=sum(counts))
    pos = torch.arange(sum(counts), device=device) - (torch.cumsum(new, 0) - new)[seq]
    slots = torch.arange(batch, device=device)
    runs = tuple(RowRange(n, b, 0) for b, n in enumerate(counts))
    place = Placement(pos, seq, pos, new, slots[:, None], starts, runs)
    return Append(slots, seq, pos, (place,), tuple(counts), tuple(counts), tuple(range(batch)), starts)
