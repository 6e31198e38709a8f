"""The state of a hybrid model's recurrent layers, in transformers' own cache layers, as a SequenceState.

A pass overwrites this state, and nothing of it can be undone. So each pass works on a copy, and what it was before the
pass is kept: a batch can be cut to where its last pass began, to a living snapshot, and to 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from longreach.adapters.transformers.continuation import check_continued, why_not_continued
from longreach.adapters.transformers.step import ModelFacts, Step
from longreach.cache import SequenceState
from longreach.errors import Unsupported
from longreach.ops.types import KVView

Fields = dict[str, Any]


@dataclass(eq=False)
class _Copy:
    """What all layers held when the sequences had these lengths. stale: they were cut below it since."""

    lengths: list[int]
    fields: list[Fields]
    stale: bool = False


class RecurrentState:
    """A SequenceState over transformers' cache layers, for a batch that is read and cut as a whole.

    layers: LinearAttentionLayers. Between passes their tensors are never written to, so snapshots are references.
    """

    def __init__(self, layers: Sequence[Any], batch: int):
        self.layers, self._lengths = layers, [0] * batch
        self._fresh = self._copy()
        self._before: _Copy | None = None  # the last pass, or the one under way
        self._under_way = False
        self._copies = WeakSet[_Copy]()

    # a pass

    @property
    def begun(self) -> bool:
        """Whether any token is in the state."""
        return any(self._lengths)

    def begin(self, real: Tensor | None, width: int) -> None:
        """Begin a pass of `width` columns. real: bool [B, width], None if all are tokens.

        Raises Unsupported for padding that would enter the state.
        """
        self._check_padding(real, width)
        self._before, self._under_way = self._copy(), True
        for layer in self.layers:
            vars(layer).update(_map(vars(layer), _own))

    def commit(self, added: Sequence[int]) -> None:
        """The pass has run: added[b] tokens of sequence b are in the state."""
        self._lengths = [n + more for n, more in zip(self._lengths, added, strict=True)]
        self._under_way = False

    def _check_padding(self, real: Tensor | None, width: int) -> None:
        if real is None:
            return
        begun = torch.tensor(self._lengths, device=real.device)[:, None] > 0
        if bool((~real & (begun | (real.cumsum(1) > 0))).any()):
            raise Unsupported(
                "attention_mask: a sequence has padding after its first token, and recurrent layers would take it for "
                "a token; pad on the left, or read such sequences one by one"
            )
        if width == 1 and not bool(real.all()):
            raise Unsupported(
                "attention_mask: a pass of one column with padding in it: recurrent layers take no mask then, and the "
                "padding would enter their state; read more columns in a pass (prefill_chunk_size)"
            )

    # with the sequences

    def reset(self, slots: Tensor) -> None:
        if sorted(slots.tolist()) != list(range(len(self._lengths))):
            raise Unsupported("recurrent layers: one sequence of a batch cannot be emptied alone; empty all")
        self._put(self._fresh)

    def check_truncate(self, slots: Tensor, lengths: Tensor) -> None:
        """Raise Unsupported unless the state of these lengths is known."""
        self._find(self._target(slots, lengths))

    def truncate(self, slots: Tensor, lengths: Tensor) -> None:
        """Cut to lengths that `check_truncate` allows."""
        found = self._find(self._target(slots, lengths))
        if found is not None:
            self._put(found)

    def overwrite(self, slots: Tensor, lengths: Tensor) -> None:
        raise Unsupported("recurrent layers: tokens cannot be overwritten, as their state depends on all before")

    def written(self, layer: int, view: KVView, seq: Tensor, slot: Tensor) -> None:
        """Nothing here is computed from keys."""

    def check_keep(self, layer: int) -> None:
        """Any keys may be evicted: the state is of tokens, whether their keys are kept or not."""

    def kept(self, layer: int, view: KVView) -> None:
        """See `check_keep`."""

    def snapshot(self) -> Callable[[], None]:
        """While the result lives, the batch can be cut to its present lengths. It holds the present tensors."""
        copy = self._copy()
        self._copies.add(copy)

        def restore() -> None:
            if not copy.stale:
                self._put(copy)

        return restore

    def select(self, slots: Tensor, pages: Sequence[Tensor]) -> SequenceState:
        raise Unsupported(
            "recurrent layers: their state lies in transformers' own cache layers and cannot be copied for other "
            "sequences; read the prompt again in a cache of its own"
        )

    def to_save(self) -> dict[str, Tensor]:
        raise Unsupported("recurrent layers: their state cannot be saved; read the prompt again instead")

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Nothing of it is saved."""

    @property
    def generation(self) -> int:
        return 0

    @property
    def nbytes(self) -> int:
        held = [vars(layer) for layer in self.layers] + (self._before.fields if self._before else [])
        return sum(x.nbytes for x in {id(x): x for fields in held for x in _tensors(fields)}.values())

    def _target(self, slots: Tensor, lengths: Tensor) -> list[int]:
        target = list(self._lengths)
        for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
            target[slot] = length
        return target

    def _find(self, target: list[int]) -> _Copy | None:
        """The copy of these lengths; None where that is the present state."""
        if not any(target):
            return self._fresh
        if target == self._lengths and not self._under_way:
            return None
        kept = [self._before] if self._before is not None else []
        for copy in (*kept, *self._copies):
            if copy.lengths == target and not copy.stale:
                return copy
        lengths = sorted({str(copy.lengths) for copy in (*kept, *self._copies) if any(copy.lengths) and not copy.stale})
        raise Unsupported(
            f"the state of recurrent layers cannot be cut from {self._lengths} to {target} tokens: expected 0, or the "
            f"lengths where the last pass began or a snapshot was taken ({', '.join(lengths) or 'none'}); empty the "
            f"cache (cache.reset()) and read the tokens again"
        )

    def _copy(self) -> _Copy:
        return _Copy(list(self._lengths), [_map(vars(layer), lambda x: x) for layer in self.layers])

    def _put(self, copy: _Copy) -> None:
        for layer, fields in zip(self.layers, copy.fields, strict=True):
            vars(layer).update(_map(fields, lambda x: x))
        self._lengths, self._under_way = list(copy.lengths), False
        self._before = None
        for other in self._copies:
            other.stale |= any(a > b for a, b in zip(other.lengths, copy.lengths, strict=True))


def _map(fields: Fields, change: Callable[[Tensor], Tensor]) -> Fields:
    """The fields with their tensors changed; dicts (of several states in a layer) are new ones."""

    def of(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: of(value) for key, value in x.items()}
        return change(x) if isinstance(x, Tensor) else x

    return {name: of(value) for name, value in fields.items()}


def _own(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.detach().clone()


def _tensors(fields: Fields) -> Iterator[Tensor]:
    for value in fields.values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value)


@contextmanager
def recurrent_pass(step: Step) -> Iterator[None]:
    """Within this block the model runs the step. An error leaves the state to `LongreachCache.abandon`."""
    state = None if step.cache is None else step.cache.recurrent
    if state is None:
        _check_no_cache(step)
        yield
        return
    if state.begun and step.shape[1] > 1:
        check_continued(_continued(step.facts))
    state.begin(step.real, step.shape[1])
    yield
    state.commit(step.append.added)


def continues(facts: ModelFacts) -> bool:
    """Whether a pass of several tokens may follow another one."""
    return not facts.hybrid or _continued(facts) is None


def pass_size(facts: ModelFacts, held: int, chunk: int, tokens: int) -> int:
    """Tokens per pass for reading `tokens` into a cache that holds `held` columns. chunk: as the caller wants it.

    Layers that take no state in a pass of several tokens get a prompt whole, and what follows token by token.
    """
    if continues(facts):
        return chunk
    return 1 if held else tokens


def _continued(facts: ModelFacts) -> str | None:
    """Why a pass of several tokens cannot follow another one, else None."""
    if not facts.continued:
        assert facts.decoder is not None
        config = facts.decoder.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
        facts.continued = (why_not_continued(facts.decoder, config),)
    return facts.continued[0]


def _check_no_cache(step: Step) -> None:
    """Without a cache the state ends with the pass, so that only padding between tokens is wrong."""
    if step.real is None or not step.facts.hybrid:
        return
    before, after = step.real.cumsum(1) > 0, step.real.flip(1).cumsum(1).flip(1) > 0
    if bool((~step.real & before & after).any()):
        raise Unsupported(
            "attention_mask: padding between the tokens of a sequence, which recurrent layers would take for tokens"
        )
