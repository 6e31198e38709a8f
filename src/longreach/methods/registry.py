"""The registered methods, by name. Strings, so that listing them imports none."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from longreach.errors import InvalidInput, UnknownName
from longreach.methods.base import AttentionMethod
from longreach.methods.call import ModelShape, Phase
from longreach.methods.slots import Eviction, Fusion
from longreach.methods.values import value_of

METHODS = {
    "dense": "longreach.methods.dense:Dense",
    "streaming_llm": "longreach.methods.streaming_llm:StreamingLLM",
    "oracle_top_k": "longreach.methods.oracle_top_k:OracleTopK",
    "oracle_sampling": "longreach.methods.oracle_sampling:OracleSampling",
    "quest": "longreach.methods.quest:Quest",
    "omnikv": "longreach.methods.omnikv:OmniKV",
    "less_is_more": "longreach.methods.less_is_more:LessIsMore",
    "loki": "longreach.methods.loki:Loki",
    "kascade": "longreach.methods.kascade:Kascade",
    "mac": "longreach.methods.mac:MAC",
    "magicpig": "longreach.methods.magicpig:MagicPIG",
    "block_mka": "longreach.methods.block_mka:BlockMKA",
}
FUSIONS = {
    "full_reuse": "longreach.methods.fusion:FullReuse",
    "pie": "longreach.methods.fusion:PIE",
    "legolink": "longreach.methods.fusion:LegoLink",
    "cacheblend": "longreach.methods.fusion:CacheBlend",
    "a3": "longreach.methods.fusion:A3",
    "a3_deep": "longreach.methods.fusion:A3Deep",
    "dependence": "longreach.methods.fusion:Dependence",
}
EVICTIONS = {"snapkv": "longreach.methods.snapkv:SnapKV"}
NONE = ("none",)  # leaves the fuse or evict slot empty


def method_class(name: str) -> type[AttentionMethod]:
    """The class registered as `name`. Raises UnknownName with the known ones."""
    if name not in METHODS:
        raise UnknownName("method", name, METHODS)
    module, _, attribute = METHODS[name].partition(":")
    return getattr(import_module(module), attribute)


def names(phase: Phase | None = None) -> tuple[str, ...]:
    """All methods, or those that fill a slot."""
    return tuple(n for n in METHODS if phase is None or phase in method_class(n).phases)


def unfit(model: ModelShape) -> dict[str, str]:
    """Name -> reason, for methods whose default options do not fit a model (for example: no plan is shipped for it)."""
    found = dict[str, str]()
    for name in METHODS:
        try:
            method_class(name)().check(model)
        except InvalidInput as error:
            found[name] = str(error)
    return found


def choose(phase: Phase, method: str | AttentionMethod | None, **given: Any) -> AttentionMethod:
    """The method for a slot: text, a configured method, or None for dense.

    method: as text a name, with options behind it: "quest", "oracle_top_k k=0.025 dense_layers=[0]" (`split`).
    given: further options of a method named by text.
    Raises UnknownName for a name or option that does not exist or does not fill the slot, InvalidInput for what is no
    method.
    """
    if isinstance(method, AttentionMethod):
        if given:
            raise InvalidInput(f"{phase}: give options with a method's name, or a configured method, not both")
        chosen = method
        for attribute in ("name", "phases"):
            if not hasattr(method, attribute):
                raise InvalidInput(
                    f"{phase}: {type(method).__name__} has no {attribute}; a method has a name, such as "
                    f'name = "mine", and the phases that it serves, such as phases = ("decode",)'
                )
    else:
        _refuse_other(phase, method, AttentionMethod)
        name, own = ("dense", {}) if method is None else split(method, f"{phase} method {method!r}")
        if name not in names(phase):
            raise UnknownName(f"{phase} method", name, names(phase))
        chosen = method_class(name).make(**_together(phase, own, given))
    if phase not in chosen.phases:
        raise UnknownName(f"{phase} method", chosen.name, names(phase))
    return chosen


def fusion_class(name: str) -> type[Fusion]:
    """The fusion method registered as `name`. Raises UnknownName with the known ones."""
    return _class("fuse", name, FUSIONS)


def eviction_class(name: str) -> type[Eviction]:
    """The eviction method registered as `name`. Raises UnknownName with the known ones."""
    return _class("evict", name, EVICTIONS)


def _class(slot: str, name: str, known: dict[str, str]) -> type[Any]:
    if name not in known:
        raise UnknownName(f"{slot} method", name, (*NONE, *known))
    module, _, attribute = known[name].partition(":")
    return getattr(import_module(module), attribute)  # type: ignore[no-any-return]


def options_of(text: str) -> tuple[str, ...]:
    """Names of the options of the method that a text names, in any slot; () if there is no such method."""
    name = text.partition(" ")[0]
    for known, class_of in ((METHODS, method_class), (FUSIONS, fusion_class), (EVICTIONS, eviction_class)):
        if name in known:
            return tuple(class_of(name).options())
    return ()


def choose_fusion(fuse: str | Fusion | None, **options: Any) -> Fusion | None:
    """The method for the fuse slot: text, as `choose` takes it, a configured one, or None ("none") for none.

    Raises UnknownName for a name or option that does not exist, InvalidInput for options of none.
    """
    return _chosen("fuse", fuse, Fusion, fusion_class, options)


def choose_eviction(evict: str | Eviction | None, **options: Any) -> Eviction | None:
    """The method for the evict slot, as `choose_fusion`."""
    return _chosen("evict", evict, Eviction, eviction_class, options)


def _refuse_other(slot: str, given: Any, kind: type[Any]) -> None:
    """Raise InvalidInput for what is neither text nor None; a class is told how to become a method."""
    if isinstance(given, type) and issubclass(given, kind):
        name = getattr(given, "name", None)
        by_name = f' or {slot}="{name}"' if name in {*METHODS, *FUSIONS, *EVICTIONS} else ""
        raise InvalidInput(
            f"{slot}: got the class {given.__name__}, which is no configured method; write {given.__name__}(){by_name}"
        )
    if given is not None and not isinstance(given, str):
        raise InvalidInput(f"{slot}: expected a configured method of this slot or its name, got {given!r}")


def _together(slot: str, own: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    if twice := sorted(own.keys() & given.keys()):
        raise InvalidInput(f"{slot}: {', '.join(twice)} is set in the method's text and as an option; keep one of them")
    return own | given


def _chosen(
    slot: str, given: Any, kind: type[Any], class_of: Callable[[str], type[Any]], options: dict[str, Any]
) -> Any:
    if given in (None, *NONE) and options:
        known = " or ".join(EVICTIONS if slot == "evict" else FUSIONS)
        raise InvalidInput(
            f"{', '.join(f'{slot}.{option}' for option in options)}: an option of a method, and the {slot} slot has "
            f"none; name the method: {slot}={known} (--{slot} on the command line)"
        )
    if given in (None, *NONE) or isinstance(given, kind):
        if options:
            raise InvalidInput(f"{slot}: give options with a method's name, or a configured method, not both")
        return given if isinstance(given, kind) else None
    _refuse_other(slot, given, kind)
    name, own = split(given, f"{slot} method {given!r}")
    return class_of(name).make(**_together(slot, own, options))


def split(text: str, where: str) -> tuple[str, dict[str, Any]]:
    """ "oracle_top_k k=0.025 dense_layers=[0]" -> ("oracle_top_k", {"k": 0.025, "dense_layers": [0]}).

    Values as `values.value_of` takes them. where: what InvalidInput names.
    """
    try:
        name, *settings = shlex.split(text)
    except ValueError as error:
        raise InvalidInput(f"{where}: expected NAME and option=value, such as 'oracle_top_k k=0.1'") from error
    return name, options(settings, where)


def options(settings: Sequence[str], where: str) -> dict[str, Any]:
    """["k=0.1"] -> {"k": 0.1}. where: the source that InvalidInput names for a wrong setting, or one set twice."""
    found: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not (key and equals and value):
            raise InvalidInput(f"{where}: {setting!r} is no option=value, such as k=0.1")
        if key in found:
            raise InvalidInput(f"{where}: {key} is set twice; keep one of them")
        found[key] = value_of(value, where)
    return found


def from_json(config: str | dict[str, Any]) -> AttentionMethod:
    """The method that `AttentionMethod.to_json` described. Raises InvalidInput, UnknownName."""
    try:
        fields = json.loads(config) if isinstance(config, str) else config
    except json.JSONDecodeError as error:
        raise InvalidInput(f"method config: expected a JSON object, got {str(config)[:40]!r} ({error})") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("name"), str):
        raise InvalidInput(f'method config: expected an object with a "name", got {fields!r}')
    return method_class(fields["name"]).make(**{key: value for key, value in fields.items() if key != "name"})
