"""One pass of a fused prompt: all tokens enter a model, stored keys and values are placed, chosen tokens run.

Hooks on the decoder's layers cut hidden states, position ids and (cos, sin) to the chosen tokens. Hooks on the
attention modules place a layer's stored keys and values before the layer writes its own over them. No family's code is
known: a decoder layer is the parent of an attention module.

Several prompts over the same chunks run as one pass: their tokens stand one behind the other in one row of the model,
and attention separates the sequences. Each layer's stored keys and values are loaded once and placed for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from longreach.adapters.transformers.attach import Session
from longreach.adapters.transformers.checks import check_chunks, check_model, decoder_of
from longreach.adapters.transformers.fusing.loading import Loading, Wait
from longreach.adapters.transformers.fusing.prompt import FusedPrompt
from longreach.adapters.transformers.hf_cache import LongreachCache
from longreach.adapters.transformers.prompt_tokens import check_tokens, uses_chunk_frequencies
from longreach.adapters.transformers.ranks import Ranks, in_pass, together
from longreach.adapters.transformers.rotary import (
    Captured,
    Rotation,
    attention_modules,
    captured,
    find_rotation,
    probing,
)
from longreach.adapters.transformers.step import Step
from longreach.cache import Append, Placement
from longreach.errors import InvalidInput, Unsupported
from longreach.methods.call import LayerCall
from longreach.methods.slots import FullLayer, Fusion, PromptParts
from longreach.ops import HeadShard, KVView, RotaryAngles, Rows
from longreach.runtime import Pending


@dataclass(frozen=True)
class FusionReport:
    """What became of a prompt's tokens. exact: stored ones that are what a plain prefill makes; recomputed: stored ones
    that ran; reused: stored ones that are not exact and did not run; computed: those that were not stored.

    key_error, value_error: for each layer whose stored keys and values were placed, how far they were off at the
    recomputed tokens: norm of the difference over norm of the recomputed; None if no token was recomputed or the norm
    is zero.
    loaded_bytes: of stored keys and values that were copied to the model's device; waited_seconds: how long its stream
    waited for copies on the other stream (see `Loading`), None where copies did not run ahead, so that no wait was
    measured. Prompts of a batch share both. Under tensor parallelism the errors are of all KV heads, bytes and seconds
    of this rank.
    """

    tokens: int
    exact: int
    recomputed: int
    reused: int
    computed: int
    key_error: tuple[float | None, ...]
    value_error: tuple[float | None, ...]
    loaded_bytes: int = 0
    waited_seconds: float | None = None


class _Probed(Exception):
    """Leaves a pass whose questions have chosen."""

    def __init__(self, chosen: list[Tensor]):
        super().__init__()
        self.chosen = chosen


class FusedPass:
    def __init__(
        self, session: Session, cache: LongreachCache, prompts: Sequence[FusedPrompt], fusion: Fusion,
        ranks: Ranks | None, then: int,
    ):  # fmt: skip
        self.session, self.cache, self.prompts, self.fusion, self.ranks = session, cache, prompts, fusion, ranks
        model = session.model
        self.device = model.device
        self.attending, self.layers = _modules(session)
        fusion.check(session.facts.shape)
        self.probes = fusion.probes(session.facts.shape) if prompts[0].chunks else ()
        self.chunks = prompts[0].chunks
        self._check_chunks()
        self.counts = [len(prompt.ids) for prompt in prompts]
        self.starts = [0, *accumulate(self.counts)]  # of each prompt in the row of all tokens
        ids = torch.tensor([token for prompt in prompts for token in prompt.ids])
        check_tokens(model, ids, "the prompt")
        self.ids = ids[None].to(self.device)
        self.positions = torch.cat([torch.arange(count, device=self.device) for count in self.counts])[None]
        same = uses_chunk_frequencies(model, max(self.counts))
        self.parts: list[PromptParts] = [prompt.parts(self.device, chunk_frequencies=same) for prompt in prompts]
        self.stored_index = self.parts[0].at  # the stored tokens of each
        self.rotated_to = self.stored_index  # positions that stored keys are rotated to
        if not fusion.true_positions:
            local = [prompt.local_positions(self.device) for prompt in prompts]  # each is checked
            self.rotated_to = local[0][self.stored_index]
        self.then = then
        self.probe: int | None = None  # the layer up to which the pass under way runs, to choose there
        self.chosen: list[Tensor] | None = None  # what a probe has chosen, for each prompt
        self.index: Tensor | None = None  # the tokens that run, once chosen
        self.ends: list[int] = []  # where the tokens of each prompt end among those that run
        self.last = torch.empty(len(prompts), dtype=torch.int64, device=self.device)  # of each prompt: its logits count
        self.angles: tuple[Tensor, Tensor] | None = None  # of all tokens, in the layer under way
        self.narrowed: dict[int, tuple[Tensor, Tensor]] = {}  # id of what layers get for all tokens -> whole, cut
        # of a layer, and there the recomputed tokens' page and offset
        self.places: tuple[Placement, Tensor, Tensor] | None = None
        # (id of cos, how a layer rotates) -> cos, angles of the stored tokens
        self.stored_angles: dict[tuple[int, Rotation], tuple[Tensor, RotaryAngles]] = {}
        self.loading = Loading((), self.device)
        self.loaded_bytes, self.waits, self.measured = 0, list[Wait](), True
        self.recomputed_index: Tensor | None = None  # the recomputed tokens of all prompts
        self.recomputed_counts: list[int] = []  # how many each prompt has
        self.placing: list[Append] = []  # for each prompt, the stored tokens' part of the pass
        self.placed: tuple[Tensor, Tensor] | None = None  # what was placed where tokens are recomputed
        self.counted: Pending | None = None  # what probes have read, for the next pass to commit
        self.errors: dict[int, Tensor] = {}  # layer -> [B, 4], norms: of key and value differences, and of both

    def run(self) -> Tensor:
        for layer in self.probes:
            self.probe = layer
            try:
                self._pass()
            except _Probed as found:
                self.chosen = found.chosen
        self.probe = None
        return self._pass()

    def _pass(self) -> Tensor:
        session = self.session
        self.index = self.recomputed_index = self.placed = self.places = None
        self.placing, self.ends = [], self.starts[1:]
        self.narrowed.clear()
        self.stored_angles.clear()
        full = self.fusion.full_layers
        shards = None if self.ranks is None else session.facts.shards
        self.loading = Loading(
            [chunk for _, chunk in self.chunks], self.device, full + 1 if full else 0,
            len(self.layers) if self.probe is None else self.probe + 1, shards,
            values=full if self.fusion.compares_values else None,
        )  # fmt: skip
        self.cache.reserve(self.counts, self.then)  # a probe gives memory back
        append = self.cache.kv.begin(range(len(self.counts)), self.counts)
        layers = session.new_pass(self.cache, False)
        if self.probe is not None:  # nothing of it is kept, so that no method needs to observe it
            layers = replace(layers, segments=(replace(layers.segments[0], observers=()),), reads_of=self.fusion)
        self.step = Step(
            layers, session.facts, (1, self.ids.shape[1]), None, append, self.cache,
            packed=tuple(self.counts),
        )  # fmt: skip
        session.next_step = self.step
        try:
            with self._hooks(), in_pass(self.ranks):
                # `last` is filled when the tokens that run are chosen, on the way to the logits
                out = session.model(
                    input_ids=self.ids, position_ids=self.positions, past_key_values=self.cache, use_cache=True,
                    logits_to_keep=self.last,
                )  # fmt: skip
        finally:
            session.next_step = None
            self.loaded_bytes += self.loading.bytes
            self.waits += self.loading.waits
            self.measured &= self.loading.runs_ahead
        return out.logits[0].float()

    def reports(self) -> list[FusionReport]:
        """Of each prompt. Waits for the device."""
        placed = list(self.errors)
        norms = self._of_all_heads(torch.stack(list(self.errors.values()))).tolist() if placed else []
        by_layer = dict(zip(placed, norms, strict=True))
        waited = sum(wait.seconds() for wait in self.waits) if self.measured else None
        return [self._report(number, by_layer, waited) for number in range(len(self.prompts))]

    def _report(self, number: int, norms: dict[int, list[list[float]]], waited: float | None) -> FusionReport:
        parts, count, again = self.parts[number], self.counts[number], self.recomputed_counts[number]
        stored, exact = int(parts.stored.sum()), int(parts.exact.sum())
        errors = {
            n: (_relative(k, key), _relative(v, value))
            for n, some in norms.items() for k, v, key, value in [some[number]]
        }  # fmt: skip
        shares = [errors.get(layer, (None, None)) for layer in range(len(self.layers))]
        return FusionReport(
            count, exact, again, stored - exact - again, count - stored, tuple(key for key, _ in shares),
            tuple(value for _, value in shares), self.loaded_bytes, waited,
        )  # fmt: skip

    def _of_all_heads(self, own: Tensor) -> Tensor:
        """Norms [L, B, 4] of the layers' errors over this rank's KV heads -> over those of all ranks."""
        if self.ranks is None:
            return own
        shards = [self.session.facts.shards[layer] for layer in self.errors]
        holders = own.new_tensor([self.ranks.size * shard.count / shard.total for shard in shards])  # of each head
        return self.ranks.sum(own.square() / holders[:, None, None]).sqrt()

    def _check_chunks(self) -> None:
        for number, (start, chunk) in enumerate(self.chunks):
            where = f"chunk {number}, at token {start}"
            if len(chunk.keys) != len(self.layers):
                raise InvalidInput(
                    f"{where}: it holds {len(chunk.keys)} layers and the model has {len(self.layers)}; it is another "
                    f"model's"
                )
            shape, held = self.session.facts.shape, (chunk.keys[0].shape[0], chunk.keys[0].shape[2])
            if held != (shape.kv_heads, shape.head_dim):
                raise InvalidInput(
                    f"{where}: it holds {held[0]} KV heads of {held[1]} channels and the model has {shape.kv_heads} of "
                    f"{shape.head_dim}; it is another model's"
                )
            if chunk.keys[0].dtype != self.session.model.dtype:
                raise InvalidInput(
                    f"{where}: it holds {chunk.keys[0].dtype} and the model runs in {self.session.model.dtype}; "
                    f"compute it with the model as it runs"
                )

    # hooks

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        made = [m.register_forward_pre_hook(self._layer(n), with_kwargs=True) for n, m in enumerate(self.layers)]
        made += [
            m.register_forward_pre_hook(self._attention(n), with_kwargs=True) for n, m in enumerate(self.attending)
        ]
        made += [m.register_forward_hook(self._attended(n)) for n, m in enumerate(self.attending)]
        try:
            yield
        finally:
            for hook in made:
                hook.remove()

    def _layer(self, number: int) -> Callable[..., Any]:
        """Before a decoder layer: from the last full layer on, cut its arguments to the tokens that run."""

        def cut(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if probing():
                return None
            pair = kwargs.get("position_embeddings")
            if not (isinstance(pair, tuple) and len(pair) == 2):
                raise Unsupported(f"{type(module).__name__} (layer {number}) gets no pair (cos, sin) to rotate by")
            self.angles = pair
            if number == 0 and self.counted is not None:
                self.session.ledger.resume(self.counted)
            if number == self.fusion.full_layers:
                self._choose(None if number == 0 else self._computed(number, module, args, kwargs))
                if args:
                    args = (args[0][:, self.index], *args[1:])
                else:
                    kwargs["hidden_states"] = kwargs["hidden_states"][:, self.index]
            if self.index is not None:
                kwargs = {**kwargs, "position_embeddings": self._narrowed(pair)}
                if isinstance(kwargs.get("position_ids"), Tensor):
                    kwargs["position_ids"] = self._cut(kwargs["position_ids"])
            return args, kwargs

        return cut

    def _narrowed(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(cos, sin) of the tokens that run; layers share them as they share those of all tokens."""
        cos, sin = pair
        return self._cut(cos), self._cut(sin)

    def _cut(self, x: Tensor) -> Tensor:
        """[1, T, ...] of all tokens -> of those that run; made once for all layers that get the same tensor."""
        known = self.narrowed.get(id(x))
        if known is None:
            known = self.narrowed[id(x)] = x, x[:, self.index]
        return known[1]

    def _computed(
        self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[FullLayer]:
        """Queries, keys and values of all tokens in a layer, by prompt; the keys and values go to the cache."""
        assert self.angles is not None
        found = captured(module, args, kwargs, *self.angles)
        step, values = self.step, found.value[0].transpose(0, 1)
        self._shard(layer, found.key)  # before stored values are loaded
        self.cache.kv.append(layer, step.append, found.key[0].transpose(0, 1), values)
        stored = lru_cache(1)(lambda: self.loading.values(layer))
        return [
            FullLayer(self._question(layer, found, number), part, stored)
            for number, part in enumerate(values.split(self.counts))
        ]

    def _question(self, layer: int, found: Captured, number: int) -> LayerCall:
        """The rows of a prompt's question, the last that run of it, over the keys of all its tokens."""
        step, end, one = self.step, self.ends[number], slice(number, number + 1)
        last = slice(end - (self.counts[number] - self.prompts[number].question), end)
        slots, q = step.append.at(layer).slot[last], found.query[0].transpose(0, 1)[last]
        kv, scale = self.cache.kv.view(layer, step.append), found.terms.get("scaling")
        if len(self.prompts) > 1:
            kv = _sequence(kv, one)
        return step.layers.call(
            layer, Rows(q, torch.zeros_like(slots), slots), kv, step.append.slots[one],
            q.shape[2] ** -0.5 if scale is None else float(scale),
            softcap=found.terms.get("softcap"), sink_logit=found.terms.get("s_aux"),
            shard=self._agreeing(self._shard(layer, found.key)),
        )  # fmt: skip

    def _choose(self, full: Sequence[FullLayer] | None) -> None:
        """Set what runs from here on. Counts are known on the host, so nothing waits for the device."""
        chosen = [parts.at[:0] for parts in self.parts] if self.chosen is None else self.chosen
        if self.chunks and not self.probes:
            chosen = self._choices(full)
        each = list(zip(self.starts, chosen, self.parts, strict=False))
        # ascending, as Step.narrow and attention by the order of rows expect
        index = [start + torch.cat([some, parts.computed]).sort().values for start, some, parts in each]
        self.recomputed_index = torch.cat([start + some for start, some, _ in each])
        self.recomputed_counts = [len(some) for some in chosen]
        self.index, counts = torch.cat(index), [len(some) for some in index]
        self.ends = list(accumulate(counts))
        self.last.copy_(torch.tensor(self.ends) - 1, non_blocking=True)
        self.step.narrow(self.index, counts)

    def _attention(self, number: int) -> Callable[..., Any]:
        """Before an attention module: place what is stored of the layer; what runs writes its own over it."""

        def place(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if probing() or self.index is None or not len(self.stored_index):
                return
            if number == self.fusion.full_layers > 0:  # keys and values of all tokens are there
                return
            if self.ranks is not None and number not in self.session.facts.shards:
                self._shard(number, captured(module, args, kwargs, *kwargs["position_embeddings"]).key)
            self._place(number, self._rotation(number, module, args, kwargs))
            if number == self.probe:
                self._probed(number, module, args, kwargs)

        return place

    def _probed(self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The question has come to the layer in which it chooses: the pass has done its work."""
        found = captured(module, args, kwargs, *kwargs["position_embeddings"])
        k, v = (x[0].transpose(0, 1) for x in (found.key, found.value))
        self.cache.kv.append(layer, self.step.append, k, v)
        stored = lru_cache(1)(lambda: self.loading.values(layer))
        calls = [self._question(layer, found, number) for number in range(len(self.prompts))]
        chosen = self._choices([FullLayer(call, v[:0], stored) for call in calls])
        self.counted = self.session.ledger.put_aside()
        raise _Probed(chosen)

    def _choices(self, layers: Sequence[FullLayer] | None) -> list[Tensor]:
        """int64 [r] of each prompt: stored tokens that are recomputed; the same on all ranks, as they run together."""
        with together(self.ranks):
            found = list[Tensor]()
            for number, parts in enumerate(self.parts):
                layer = None if layers is None else layers[number]
                found.append(self.fusion.choose(parts, layer))
                if layer is not None:
                    self.session.ledger.add_observer("prefill", layer.call, self.fusion)
        if self.ranks is None:
            return found
        return list(self.ranks.first(torch.cat(found)).split([len(some) for some in found]))

    def _shard(self, layer: int, key: Tensor) -> HeadShard:
        """The KV heads that this rank holds of a layer whose keys arrive as `key` [1, G, T, D]."""
        return self.session.facts.shard(layer, self.attending[layer], key.shape[1])

    def _agreeing(self, shard: HeadShard) -> HeadShard:
        """The shard, whose sums over ranks raise on all of them where one failed to come to its own."""
        return shard if self.ranks is None or shard.count == shard.total else replace(shard, sum=self.ranks.sum)

    def _place(self, layer: int, rotation: Rotation | None) -> None:
        assert self.step.whole is not None and self.recomputed_index is not None
        k, v = self.loading.layer(layer)
        angles = None if rotation is None else self._stored_angles(rotation)
        if not self.placing:
            self.placing = [self.step.whole.take(start + self.stored_index) for start in self.starts[:-1]]
        for placing in self.placing:
            self.cache.kv.append(layer, placing, k, v, angles=angles)
        self.placed = self._held(layer) if len(self.recomputed_index) else None

    def _stored_angles(self, rotation: Rotation) -> RotaryAngles:
        """The angles that stored keys are rotated by; layers share them as they share those of all tokens."""
        assert self.angles is not None
        name = id(self.angles[0]), rotation
        if name not in self.stored_angles:
            cos, sin = (rotation.pairs(x)[0, self.rotated_to] for x in self.angles)
            self.stored_angles[name] = self.angles[0], RotaryAngles(cos, sin, rotation.layout)
        return self.stored_angles[name][1]

    def _attended(self, number: int) -> Callable[..., Any]:
        """After an attention module: how far what was placed was off, where it was recomputed."""

        def compare(module: nn.Module, args: Any, output: Any) -> None:
            if probing() or self.placed is None:
                return
            after = self._held(number)
            differences = torch._foreach_sub(after, self.placed)
            parts = [part for x in (*differences, *after) for part in x.split(self.recomputed_counts)]
            norms = torch.stack(torch._foreach_norm(parts, dtype=torch.float32))
            self.errors[number], self.placed = norms.view(4, -1).T, None

        return compare

    def _held(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [r, G, D] that the cache holds of the recomputed tokens."""
        assert self.step.whole is not None
        kv, place = self.cache.kv.view(layer, self.step.whole), self.step.whole.at(layer)
        assert self.recomputed_index is not None
        if self.places is None or self.places[0] is not place:  # layers of an empty cache share theirs
            self.places = place, place.page[self.recomputed_index], place.offset[self.recomputed_index]
        _, page, offset = self.places
        return kv.k[page, :, offset], kv.v[page, :, offset]

    def _rotation(
        self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Rotation | None:
        """How the layer rotates; None where it does not."""
        known = self.session.facts.rotations
        if layer not in known:
            known[layer] = find_rotation(module, args, kwargs)
        found = known[layer]
        if isinstance(found, Rotation):
            return found
        if "does not rotate" in found:
            return None
        raise Unsupported(f"stored keys cannot be rotated to their positions: {found}")


def _relative(difference: float, size: float) -> float | None:
    """A norm over another; None where that is zero: nothing ran, or all that was recomputed is zero."""
    return difference / size if size > 0 else None


def _sequence(kv: KVView, one: slice) -> KVView:
    """One sequence of a view of several."""
    if kv.block_table is None:
        return replace(kv, k=kv.k[one], v=kv.v[one], seq_lens=kv.seq_lens[one])
    return replace(kv, seq_lens=kv.seq_lens[one], block_table=kv.block_table[one])


def _modules(session: Session) -> tuple[list[nn.Module], list[nn.Module]]:
    """The attention modules of a session's model, and the layers that hold them; the model is checked the first time.

    Raises Unsupported.
    """
    facts = session.facts
    if facts.modules is None:
        decoder = decoder_of(session.model)
        check_model(session.model, decoder, rotary=True)
        check_chunks(session.model)
        attending = attention_modules(decoder)
        facts.modules = attending, _parents(decoder, attending)
    return facts.modules


def _parents(decoder: nn.Module, attending: list[nn.Module]) -> list[nn.Module]:
    """The decoder's layers, in order: the parents of its attention modules."""
    parents = {id(child): module for module in decoder.modules() for child in module.children()}
    numbers = [int(m.layer_idx) for m in attending]  # type: ignore[arg-type]
    if numbers != list(range(len(attending))):
        raise Unsupported(f"{type(decoder).__name__} attends in layers {numbers}; fusion needs each once, in order")
    return [parents[id(module)] for module in attending]
