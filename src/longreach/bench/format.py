"""Targets in words."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from longreach.bench.case import MOST
from longreach.cache.host import gib


def goal(target: dict[str, Any]) -> str:
    """A target as text."""
    over = f" {target['over']}" if target["over"] else ""
    sign = "<=" if target["quantity"] in MOST else ">="
    return f"{target['of']}: {target['quantity']}{over} {sign} {target['bound']:g}"


def rate(entry: dict[str, Any]) -> str:
    """A competitor's rate per second: bytes read, or in prefill operations."""
    flops = entry.get("tflop_per_s")
    if flops is None:
        return f"{entry['tb_per_s']:.2f} TB/s" if "tb_per_s" in entry else "-"
    return f"{flops:.0f} TFLOP/s"


def outcome(target: dict[str, Any]) -> str:
    """A target's outcome as text."""
    if target["got"] is None:
        return "not known: no measurement to compare with"
    than = f" (against {target['than']})" if target["than"] and not target["over"] else ""
    end = "reached" if target["reached"] else f"missed by {target['missed_by']:.1%}"
    digits = ".4f" if target["quantity"] == "mass of chosen keys" else ".3g"  # it is near 1
    return f"{target['got']:{digits}}{than}, {end}"


def remarks(result: dict[str, Any]) -> Iterator[str]:
    """Further lines of a case: what was forced, all speeds, hit rates that pay, what was sampled, where a step's time
    goes, what came from host memory, what did not fit."""
    if "forced" in result:
        yield "hits are forced, for timing alone"
    if result.get("speed_over_fastest"):
        ratios = result["speed_over_fastest"]["ratios"].items()
        told = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios)
        yield f"speed over {result['speed_over_fastest']['kernel']}: {told}"
    for guard, found in result.get("break_even", {}).items():
        rates = (f"{other}: " + ("at no rate" if at is None else f"from {at:.3f} on") for other, at in found.items())
        yield f"faster, {guard}, than {'; '.join(rates)}"
    for name, preset in result.get("sampled", {}).items():
        yield f"{name} {sampled(preset)}"
    for what, parts in result.get("phases", {}).get("microseconds", {}).items():
        yield f"{what}: " + ", ".join(f"{part} {us:.0f} us" for part, us in parts.items())
    prompt = (result.get("host") or {}).get("prompt")
    for entry in result["entries"] if "host" in result else ():
        yield prompt_line(entry) if prompt else host_line(entry)
    for entry in result["entries"] if "generated" in result else ():
        yield slowest_line(entry)
    for name, why in result.get("left_out", {}).items():
        yield f"{name} left out: {why}"


KINDS = ("host_kv", "device_kv", "state", "weights")


def _memory(entry: dict[str, Any], *more: str) -> str:
    taken = {name: entry["memory"][name] for name in (*KINDS, *more)}
    return ", ".join(f"{name} {gib(x)}" for name, x in taken.items() if x is not None)  # no peak is known on a CPU


def prompt_line(entry: dict[str, Any]) -> str:
    """A prompt with keys and values in host memory: the time to its first token, and the memory it takes."""
    seconds = entry["microseconds"]["median"] / 1e6
    return f"{entry['name']}: {seconds:.2f} s to the first token; {_memory(entry, 'staging', 'prefill_peak')}"


def host_line(entry: dict[str, Any]) -> str:
    """A step with keys and values in host memory: its time, what came over the link, and the memory it takes."""
    shares = entry.get("sampled", {})
    sampled = f"; samples {shares['sampled_head']:.2%} a head, {shares['sampled_group']:.2%} a group" if shares else ""
    where = "read by the CPU" if entry["settings"].get("attend") == "cpu" else "over the link"
    return (
        f"{entry['name']}: {entry['microseconds']['median'] / 1e3:.2f} ms, {entry['tokens_per_second']:.1f} tokens/s; "
        f"{entry['link_bytes'] / 1e6:.1f} MB {where} ({entry['link_share']:.0%} of what attention reads), "
        f"{entry['link_gb_per_s']:.2f} GB/s{sampled}; {_memory(entry)}"
    )


def slowest_line(entry: dict[str, Any]) -> str:
    """The slowest step of a long answer, and the steps beyond the bound."""
    slow = entry["slowest"]
    where = ", ".join(f"{x['step']} ({x['over_median']:.2f}x)" for x in slow["above"][:10])
    return (
        f"{entry['name']}: {slow['steps']} steps, median {entry['microseconds']['median'] / 1e3:.2f} ms, slowest "
        f"{slow['over_median']:.2f}x (step {slow['step']}); {slow['count_above']} above {slow['bound']:g}x"
        f"{': ' if where else ''}{where}"
    )


def sampled(preset: dict[str, Any]) -> str:
    """What a preset of MagicPIG samples, reads and keeps, and where its time goes."""
    took = ", ".join(f"{name} {us:.1f}" for name, us in preset["parts_microseconds"].items())
    return (
        f"samples {preset['sampled_head']:.2%} a head, {preset['sampled_group']:.2%} a group; reads "
        f"{preset['percent_of_dense']:.2f}% of dense (search {preset['search_bytes'] / 1e6:.1f} MB, attention "
        f"{preset['attention_bytes'] / 1e6:.1f} MB); tables {preset['tables_percent_of_kv']:.0f}% of KV, built in "
        f"{preset['build_seconds'] * 1e3:.1f} ms a prompt and layer; us: {took}"
    )


def show_seconds(name: str, took: Mapping[str, float]) -> None:
    """Write the seconds of each part of an entry, and their sum, to stderr."""
    parts = ", ".join(f"{what.replace('_', ' ')} {seconds:.1f}" for what, seconds in took.items())
    print(f"  {name}: seconds: {parts}; together {sum(took.values()):.1f}", file=sys.stderr, flush=True)
