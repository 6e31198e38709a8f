"""One hash of everything that a model's keys and values depend on: every weight of the decoder as it is in memory, its
configuration, and the numbers and words that its modules keep (`self_attn.scaling`, `variance_epsilon`).

Buffers that no checkpoint holds count too: rotary frequencies follow from the config, but a model cast to bf16 after it
was loaded has rounded ones, and other keys than one loaded in bf16.

All bytes are hashed, each time a process loads the model. Headers, sizes and samples would pass over a fine-tuned
layer; a hash stored with the files would have to trust their dates, and misses changes made while loading: another
dtype, quantised weights, a merged adapter. It costs about a second a GB and core; threads share the tensors.

Whether a model is still the one that was hashed is asked without reading it (`holds`): configuration and modules'
numbers and words are the same, and no tensor was replaced, moved, cast, or written to as torch counts writes. Writes
behind torch's back (`.data`, numpy, a kernel that is given the pointer) are not counted; before a computed chunk is
handed out, and whenever `Documents` reads or is asked, `sampled_alike` compares SAMPLE bytes of every parameter and
buffer, evenly spread. What changes most of a tensor (a merged adapter, a scale, a sync of weights) is seen by it; a few
elements changed behind torch's back may not be, nor weights that layers keep elsewhere than in parameters and buffers
(torch.ao's packed ones), or rotary frequencies. `get_or_compute` finds a stored chunk by `holds` alone.

Not in it: the tokenizer (a chunk's key holds tokens), names, special tokens and switches that change no key, the
language-model head, hooks and functions put in the place of a layer's own, and what modules keep in attributes that are
private (`_`) or neither int, float, bool nor str. A newer transformers with another field in its
configuration, or another number in its modules, gives another fingerprint: chunks are then computed again.

Under tensor parallelism ranks gather the shards of a weight piece by piece and hash the whole, so that the digest is
that of the model in one process. All ranks must call `fingerprint`; `holds` and `sampled_alike` look at a rank's own
shards and need no other rank.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel

from longreach.adapters.transformers.checks import check_chunks, decoder_of, mka_variant
from longreach.adapters.transformers.ranks import ranks_of
from longreach.adapters.transformers.sharded_weights import gathered, is_dtensor, is_sharded, local_of
from longreach.errors import Unsupported

FORMAT = "longreach fingerprint 2"
PIECE = 1 << 26  # bytes brought to the host at a time
HELD = 1 << 31  # bytes of gathered weights that wait on the host to be hashed
SAMPLE = 64  # bytes of a tensor
THREADS = 16  # at most: more wait for memory
WITHOUT_EFFECT = (  # fields of a configuration that change no key and no value
    "architectures",
    "bos_token_id",
    "dtype",  # that of the weights counts, not that of the file
    "eos_token_id",
    "id2label",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
OF_NO_MATTER = (  # attributes of modules that change no key and no value, or that a long prompt changes
    "gradient_checkpointing",
    "max_seq_len_cached",
    "name_or_path",
    "training",
)


Seen = tuple[str, ReferenceType[Tensor], int, StorageWeakRef | None]


@dataclass(frozen=True)
class Fingerprint:
    """digest: 64 hex digits. seen: the weights by name, how often they had been written to when it was taken, and where
    they lay (casts and moves put other memory under the same parameter). sample: hash of a few bytes of each. settings:
    hash of the configuration and of the modules' numbers and words."""

    digest: str
    seen: tuple[Seen, ...]
    sample: str
    settings: str

    def holds(self, model: PreTrainedModel) -> bool:
        """Whether no weight was replaced or written to since, as torch counts writes, and no setting changed; no byte
        of a weight is read."""
        decoder = decoder_of(model)
        now = _seen(decoder)
        same = len(now) == len(self.seen) and all(
            a == b and old() is not None and old() is new() and m == n and _at(there) == _at(here)
            for (a, old, m, there), (b, new, n, here) in zip(self.seen, now, strict=True)
        )
        return same and self.settings == _hashed(_settings(decoder))

    def sampled_alike(self, model: PreTrainedModel) -> bool:
        """Whether SAMPLE bytes of every weight are unchanged; one transfer to the host from each device."""
        return self.sample == _sample(decoder_of(model))


def fingerprint(model: PreTrainedModel, *, chunks: bool = True) -> Fingerprint:
    """Hash a model's decoder. chunks: whether chunks of text are to be stored under it, else plans and whole caches.

    Raises Unsupported where not all that its keys depend on can be read, by name.
    """
    decoder = decoder_of(model)
    if chunks or mka_variant(model) is not None:
        check_chunks(model)
    name = type(decoder).__name__
    if getattr(model, "_hf_peft_config_loaded", False) or any(_of_peft(module) for module in model.modules()):
        raise Unsupported(
            f"{name} has an adapter that is not merged: which one is on, and how strongly, is in no weight; merge it "
            f"into the model first (merge_and_unload)"
        )
    seen = _seen(decoder)  # first: weights written to during hashing then count as changed
    sample, settings = _sample(decoder), _settings(decoder)
    state = _unsaved(decoder) | decoder.state_dict()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(min(THREADS, cores)) as pool:
        sharded = sorted(key for key, x in state.items() if is_sharded(x))
        digests = {key: pool.submit(_digest, name, key, state[key]) for key in state.keys() - set(sharded)}
        held, waiting = 0, []
        for key in sharded:  # in one order on all ranks, which gather together
            pieces = list(gathered(state[key], f"{name}'s {key}"))
            digests[key] = pool.submit(_digest_of, _shape(state[key]), pieces)
            held += sum(map(len, pieces))
            waiting.append(digests[key])
            if held > HELD:
                wait(waiting)
                held, waiting = 0, []
        parts = [f"{key} {digests[key].result()}" for key in sorted(state)]
    found = _hashed("\n".join([FORMAT, name, settings, *parts]))
    _check_ranks(decoder, found)
    return Fingerprint(found, seen, sample, _hashed(settings))


def _check_ranks(decoder: PreTrainedModel, digest: str) -> None:
    """Raise Unsupported on every rank if ranks hold different models: weights that are not sharded may differ."""
    ranks = ranks_of(decoder)
    if ranks is not None and len(set(ranks.all_values(int(digest[:15], 16)))) > 1:
        raise Unsupported(
            f"the {ranks.size} ranks of this {type(decoder).__name__} hold different weights or configurations; load "
            f"the same model on all of them"
        )


def _unsaved(decoder: nn.Module) -> dict[str, Any]:
    """Buffers, also those that no checkpoint holds; of frequencies that change with the length, those at first."""
    buffers = dict(decoder.named_buffers())
    changing = {n.replace("original_inv_freq", "inv_freq") for n in buffers if n.endswith("original_inv_freq")}
    return {n: x for n, x in buffers.items() if n not in changing}


def _of_peft(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "peft"


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _settings(decoder: PreTrainedModel) -> str:
    """The configuration, then the modules' plain numbers and words, sorted by name.

    What is False is left out: releases of transformers differ in which switches that are off they keep.
    """
    kept = [
        f"{prefix}.{name} {value!r}"
        for prefix, module in decoder.named_modules()
        for name, value in vars(module).items()
        if type(value) in (int, float, bool, str) and value is not False and name[0] != "_" and name not in OF_NO_MATTER
    ]
    return "\n".join([_config(decoder), *sorted(kept)])


def _config(decoder: PreTrainedModel) -> str:
    """The decoder's configuration as JSON, without private fields and those without effect."""
    fields = decoder.config.to_dict()
    kept = {k: v for k, v in fields.items() if k not in WITHOUT_EFFECT and not k.startswith("_")}
    return json.dumps(kept, sort_keys=True, default=str)


def _weights(decoder: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*decoder.named_parameters(), *decoder.named_buffers()):
        if not name.endswith("inv_freq"):  # some kinds of rotary embedding recompute theirs with the length
            yield name, tensor


@torch.no_grad()
def _sample(decoder: nn.Module) -> str:
    """Hash of SAMPLE bytes of every weight, at an odd stride, so that all bytes of an element are sampled."""
    pieces: dict[torch.device, list[Tensor]] = {}
    for _, weight in _weights(decoder):
        for part in _parts(weight.detach()):
            if part.numel() and not part.is_meta:
                flat = part.reshape(-1).view(torch.uint8)
                pieces.setdefault(part.device, []).append(flat[:: len(flat) // SAMPLE | 1])
    digest = hashlib.sha256()
    for device in sorted(pieces, key=str):
        digest.update(torch.cat(pieces[device]).cpu().numpy())  # type: ignore[arg-type]
    return digest.hexdigest()


def _parts(weight: Tensor) -> list[Tensor]:
    """A plain tensor, or those that one of another kind is made of."""
    if is_dtensor(weight):
        return _parts(local_of(weight))
    if weight.is_quantized:
        return [weight.int_repr()]
    if type(weight) in (Tensor, nn.Parameter):
        return [weight]
    if not hasattr(weight, "__tensor_flatten__"):
        return []  # not supported in fingerprints
    return [part for name in weight.__tensor_flatten__()[0] for part in _parts(getattr(weight, name))]


def _seen(decoder: nn.Module) -> tuple[Seen, ...]:
    found = []
    for name, tensor in _weights(decoder):
        held = _parts(tensor) if is_dtensor(tensor) else [tensor]  # writes go to a rank's own shard
        writes = sum(-1 if part.is_inference() else part._version for part in held)
        plain = len(held) == 1 and type(held[0]) in (Tensor, nn.Parameter)
        found.append((name, ref(tensor), writes, StorageWeakRef(held[0].untyped_storage()) if plain else None))
    return tuple(found)


def _at(storage: StorageWeakRef | None) -> int | None:
    return None if storage is None else storage.cdata


def _digest(model: str, name: str, value: Any) -> str:
    """Hash of one entry of a state dict: a tensor, or an object of quantised layers."""
    digest = hashlib.sha256()
    _feed(digest, value, f"{model}'s {name}")
    return digest.hexdigest()


def _digest_of(shape: str, pieces: list[Tensor]) -> str:
    """As _digest, of a gathered weight: its shape, and its bytes on the host."""
    digest = hashlib.sha256(shape.encode())
    for piece in pieces:
        digest.update(piece.numpy())  # type: ignore[arg-type]
    return digest.hexdigest()


def _shape(x: Tensor) -> str:
    return f"{x.dtype} {list(x.shape)} "


@torch.no_grad()
def _feed(digest: Any, value: Any, what: str) -> None:
    if isinstance(value, (list, tuple)):
        digest.update(f"{len(value)} of ".encode())
        for part in value:
            _feed(digest, part, what)
    elif value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype)):
        digest.update(f"{type(value).__name__} {value!r} ".encode())
    elif not isinstance(value, Tensor):
        raise Unsupported(f"{what} is a {type(value).__name__}, which a fingerprint does not know how to read")
    elif type(value) not in (Tensor, nn.Parameter):
        _feed_subclass(digest, value, what)
    else:
        digest.update(_shape(value).encode())
        if value.is_meta:
            raise Unsupported(f"{what} is on the meta device; load the model first")
        if value.is_quantized:
            digest.update(f"{value.qscheme()} ".encode())
            per_channel = value.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams)
            if per_channel:
                _feed(digest, (value.q_per_channel_scales(), value.q_per_channel_zero_points()), what)
            else:
                _feed(digest, (value.q_scale(), value.q_zero_point()), what)
            value = value.int_repr()
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        for first in range(0, len(flat), PIECE):
            digest.update(flat[first : first + PIECE].cpu().numpy())


def _feed_subclass(digest: Any, value: Tensor, what: str) -> None:
    """Tensors that are made of others (quantised ones): the others, and how they are put together."""
    if is_dtensor(value):  # a replicated one: all of it is here
        _feed(digest, local_of(value), what)
        return
    kind = type(value).__name__
    if not hasattr(value, "__tensor_flatten__"):
        raise Unsupported(f"{what} is a {kind}, of which a fingerprint cannot read all; load the model on one device")
    names, how = value.__tensor_flatten__()
    digest.update(f"{kind} {names} {how!r} ".encode())
    for name in names:
        _feed(digest, getattr(value, name), f"{what}.{name}")
