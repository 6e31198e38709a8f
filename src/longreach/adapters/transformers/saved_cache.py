"""Caches in files: what is saved, and what must be the same where it is loaded.

A file holds keys and values of the slots in use, and of state of methods only what does not follow from keys: MAC's
ring. Quest's bounds, Loki's coordinates, 8-bit keys, codes of blocks and hash tables are computed again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longreach.adapters.transformers.cache_file import CacheFile, Entry, check_place, damaged, opened, write
from longreach.adapters.transformers.checks import decoder_of, mka_variant
from longreach.adapters.transformers.hf_cache import LongreachCache
from longreach.adapters.transformers.oom import memory_errors
from longreach.adapters.transformers.ranks import ranks_of
from longreach.cache import CacheConfig, packed, restore
from longreach.errors import InvalidInput, Unsupported
from longreach.methods.automatic import plan_for
from longreach.methods.base import AttentionMethod
from longreach.methods.call import LayerCall
from longreach.ops import Rows
from longreach.ops.types import describe
from longreach.runtime.state import saved_name

if TYPE_CHECKING:
    from longreach.adapters.transformers.session_caches import SessionCaches

SLOTS = ("prefill", "decode", "evict", "fuse")
PathLike = str | os.PathLike[str]


def save(session: SessionCaches, cache: LongreachCache, path: PathLike, tokens: Any, overwrite: bool) -> None:
    """See `LongreachCache.save`."""
    check_place(Path(path), overwrite)
    _check_savable(session, cache)
    kv = cache.kv
    ids = None if tokens is None else _checked_tokens(tokens, cache)
    entries, layers = dict[str, Entry](), range(len(kv.memory))
    for layer in layers:
        pair = kv._held(layer)
        for number, name in enumerate("k" if pair[1] is pair[0] else "kv"):
            held = pair[number]
            shape = (sum(kv.slots_in_use(layer)), held.shape[1], held.shape[3])
            entries[f"{name}/{layer}"] = Entry(held.dtype, shape, partial(packed, kv, layer, number))
    entries |= {name: Entry.of(x) for name, x in cache.states.to_save().items()}
    if cache.padded:
        entries["mask"] = Entry.of(cache.column_mask().to(torch.uint8))
    if ids is not None:
        entries["tokens"] = Entry.of(ids)
    header = {
        **_about(session),
        "page": kv.page,
        "lengths": kv.lengths,
        "columns": cache.columns,
        "dropped": [kv.layouts[layer].dropped for layer in layers],
        "evicted_at": [kv.layouts[layer].evicted_at for layer in layers],
        "observed": [[repr(method), cache.states.observed(method)] for method in _methods(session)],
    }
    with memory_errors():
        write(Path(path), header, entries, overwrite=overwrite)


def load(session: SessionCaches, path: PathLike, config: CacheConfig | None = None) -> LongreachCache:
    """See `Session.load_cache`."""
    _check_model(session)
    with opened(Path(path)) as file:
        try:
            _compare(session, file)
            lengths, columns = list(file.header["lengths"]), int(file.header["columns"])
            cache = session.new_cache(len(lengths), config)
            _check_pages(cache, file)
            with memory_errors():
                _read(session, cache, file, lengths, columns)
        except KeyError as error:
            raise damaged(file.path, "its header does not describe a cache") from error
    return cache


def _read(session: SessionCaches, cache: LongreachCache, file: CacheFile, lengths: list[int], columns: int) -> None:
    """Fill a new cache, which is not used after an error."""
    header, layers = file.header, range(len(cache.kv.memory))
    pairs = (_pair(session, file, layer) for layer in layers)
    restore(cache.kv, lengths, header["dropped"], header["evicted_at"], pairs)
    mask = file.read("mask").bool() if "mask" in file.names else None
    cache.grow(columns, mask)
    if cache.column_mask().sum(1).tolist() != lengths:
        raise damaged(file.path, "its lengths are not those of its mask")
    known = dict(header["observed"])
    observed = {method: known[repr(method)] for method in _methods(session) if repr(method) in known}
    cache.states.note_restored({method: upto for method, upto in observed.items() if any(upto)})
    for method in observed:
        for layer in layers:
            start = saved_name(method, layer, "")
            saved = {name: file.read(name) for name in file.names if name.startswith(start)}
            if saved:
                cache.states.get(method, _first_call(session, cache, layer))
                cache.states.restore(saved)
    cache.saved_tokens = file.read("tokens") if "tokens" in file.names else None


def _pair(session: SessionCaches, file: CacheFile, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer: one tensor twice for MLA, whose values lie in the keys."""
    keys = file.read(f"k/{layer}")
    return keys, keys if session._shape.values_in_keys else file.read(f"v/{layer}")


def _methods(session: SessionCaches) -> tuple[AttentionMethod, ...]:
    return tuple(dict.fromkeys((session.decode, *session.observers)))


def _first_call(session: SessionCaches, cache: LongreachCache, layer: int) -> LayerCall:
    """A call without rows, by which a layer's state is made."""
    view, shape = cache.kv.view_of_all(layer), session._shape
    none = torch.empty(0, dtype=torch.int64, device=view.k.device)
    rows = Rows(view.k.new_empty(0, shape.query_heads, view.k.shape[3]), none, none)
    slots = torch.arange(cache.batch, device=view.k.device)
    return LayerCall(layer, rows, view, slots, 1.0, phase="prefill", model=shape)


# what is checked


def _check_savable(session: SessionCaches, cache: LongreachCache) -> None:
    """Raise for a cache that cannot be saved as it is."""
    _check_model(session)
    busy = [slot for slot, number in enumerate(cache.kv._under_way) if number]
    if cache.invalid or busy:
        raise InvalidInput(f"save: {cache.invalid or f'a pass is under way in slots {busy}; commit or abort it first'}")
    if not cache.columns:
        raise InvalidInput("save: the cache is empty; read a prompt into it first")
    if cache.eviction_due and cache.eviction is not None:
        raise Unsupported(
            f"save: {cache.eviction.name} has yet to evict keys of the prompt that was read last, by rows that are not "
            f"saved; generate two tokens first, or attach without evict"
        )
    session._plans.make(cache, session.ledger)
    for method in (session.prefill, *_methods(session)):
        if method.plan_maker(session._shape) is not None and _plan_digest(session, method) is None:
            raise Unsupported(
                f"save: {method.name} has no plan yet, and would make it of rows that are not saved; save after a "
                f"longer prompt, or attach with '{method.name} plan=plan.json'"
            )


def _check_model(session: SessionCaches) -> None:
    decoder = decoder_of(session.model)
    variant = mka_variant(session.model)
    if variant is not None:
        raise Unsupported(
            f"caches of {type(session.model).__name__} cannot be saved: its {variant} layers keep state of their own; "
            f"read the prompt again instead"
        )
    if session.facts.hybrid:
        raise Unsupported(
            f"caches of {type(session.model).__name__} cannot be saved: its recurrent layers keep state of their own; "
            f"read the prompt again instead"
        )
    if ranks_of(decoder) is not None:
        raise Unsupported(
            "caches cannot be saved under tensor parallelism, where each rank holds some heads only; load the model on "
            "one device, or read the prompt again"
        )


def _checked_tokens(tokens: Any, cache: LongreachCache) -> Tensor:
    """int64 [B, columns] on the host."""
    shape = (cache.batch, cache.columns)
    try:
        ids = torch.as_tensor(tokens).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInput(f"tokens: expected int64 {list(shape)}, got {describe(tokens)}") from error
    if ids.dtype not in (torch.int32, torch.int64) or tuple(ids.shape) != shape:
        raise InvalidInput(f"tokens: expected int64 {list(shape)}, those of the cache's columns, got {describe(ids)}")
    return ids.long()


def _about(session: SessionCaches) -> dict[str, Any]:
    """The parts of a header that must be the same where the cache is loaded, but for version and name."""
    model, shape, known = session.model, session._shape, session.fingerprint()
    return {
        "longreach": version("longreach"),
        "model": {
            "name": Path(model.config.name_or_path or "").name or type(model).__name__,
            "class": type(model).__name__,
            "layers": shape.layers,
            "config": known.settings,
            "fingerprint": known.digest,
        },
        "dtype": str(model.dtype).removeprefix("torch."),
        "methods": {slot: _json(getattr(session, slot)) for slot in SLOTS},
        "plans": {slot: _plan_digest(session, getattr(session, slot)) for slot in SLOTS[:2]},
    }


def _json(method: Any) -> Any:
    return None if method is None else json.loads(json.dumps(method.to_json()))  # tuples become lists


def _plan_digest(session: SessionCaches, method: AttentionMethod) -> str | None:
    """Hash of the calibrated plan that a method uses, None if it uses none, or none is made yet."""
    if not hasattr(method, "plan"):
        return None
    try:
        plan = plan_for(method.name, method.plan, session._shape)
    except InvalidInput:  # none that fits: the method does without, or would have been refused
        return None
    if plan is None:
        return None
    found = hashlib.sha256(json.dumps(plan.values, sort_keys=True, default=list).encode())
    for name, x in sorted(plan.arrays.items()):
        found.update(f"{name} {x.dtype} {list(x.shape)} ".encode())
        found.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _compare(session: SessionCaches, file: CacheFile) -> None:
    """Raise InvalidInput for the first thing that is not as it was where the cache was saved."""
    saved, here, path = file.header, _about(session), file.path
    old, new = saved["model"], here["model"]
    if any(old[name] != new[name] for name in ("class", "layers")):
        raise InvalidInput(
            f"{path} was saved with the model {old['name']} ({old['class']}, {old['layers']} layers), and this is "
            f"{new['name']} ({new['class']}, {new['layers']} layers); load the model that it was saved with"
        )
    for what, before, now in (
        ("another configuration", old["config"], new["config"]),
        ("another dtype", saved["dtype"], here["dtype"]),
        ("other weights", old["fingerprint"], new["fingerprint"]),
    ):
        if before != now:
            raise InvalidInput(
                f"{path} was saved with {what} of the model ({before[:12]}), and this one has {now[:12]}; "
                f"load the model as it was saved with, or read the prompt again"
            )
    for slot in SLOTS:
        before, now = saved["methods"][slot], here["methods"][slot]
        if before != now:
            raise InvalidInput(
                f"{path} was saved with {slot}={_text(before, now)}, and this session has {slot}={_text(now, before)}; "
                f"attach with the same methods and options, or read the prompt again"
            )
    for slot in here["plans"]:
        before, now = (each["plans"][slot] or "none" for each in (saved, here))
        if before != now:
            raise InvalidInput(
                f"{path} was saved with another plan of {slot}={here['methods'][slot]['name']} ({before[:12]}), and "
                f"this session's is {now[:12]}; give the same one (plan=plan.json), or read the prompt again"
            )


def _text(method: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> str:
    """A method as it is written in options: its name, and the options in which it differs from the other."""
    if method is None:
        return "None"
    same = other is not None and other["name"] == method["name"]
    rest = {**(other or {})} if same else {"name": method["name"]}
    differing = (f"{key}={value}" for key, value in method.items() if key not in rest or rest[key] != value)
    return " ".join([method["name"], *differing])


def _check_pages(cache: LongreachCache, file: CacheFile) -> None:
    saved, here = file.header["page"], cache.kv.page

    def text(page: int | None) -> str:
        return "one page a sequence" if page is None else f"pages of {page} tokens"

    if saved != here:
        config = "CacheConfig()" if saved is None else f"CacheConfig('paged', page={saved})"
        raise InvalidInput(
            f"{file.path} was saved from {text(saved)}, and this cache has {text(here)}; attach with cache={config}, "
            f"or give it to load_cache"
        )
