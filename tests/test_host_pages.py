"""What the pages say of keys and values in host memory is in the record `host`."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from longreach import CacheConfig
from longreach.adapters.transformers.loop.host_attend import LEAST
from longreach.cli.common import tell_compiled
from tests.doc_tables import ROOT, Row, record, section, tables

GPU = section((ROOT / "docs" / "magicpig" / "README.md").read_text(), "On a GPU", "On a CPU")
PAGE = GPU[GPU.index("\n### Keys and values in host memory\n") :]
WORDS = " ".join(PAGE.split())
HOST_PAGE, LOG, BENCHMARKS = (
    " ".join((ROOT / name).read_text().split())
    for name in ("docs/host.md", "docs/performance.md", "benchmarks/README.md")
)
ALONE, BATCHES, TABLE_6 = (f"host-96k-{name}" for name in ("b1", "batches", "table-6"))
LONG, ANSWER, PROMPT = "host-1m-b1", "tokens-4k-at-128k", "host-prompt-96k"
GROUP, OWN = "magicpig (10,75) group", "magicpig (10,150) own"
# Chen et al., 2024, Table 6: the column "TBT (ms)", in the order of the record
PAPER = {(10, 150): 18.31, (11, 300): 17.38, (10, 170): 16.79, (10, 220): 14.07, (9, 120): 13.93, (8, 75): 12.47}
Entry = dict[str, Any]


def case(name: str) -> dict[str, Any]:
    found: dict[str, Any] = record("host")["cases"][name]
    return found


def entries(name: str) -> dict[str, Entry]:
    return {entry["name"]: entry for entry in case(name)["entries"]}


def ms(entry: Entry) -> float:
    return float(entry["microseconds"]["median"]) / 1e3


def mb(entry: Entry) -> float:
    return float(entry["link_bytes"]) / 1e6


def gib(entry: Entry, kind: str) -> str:
    return f"{entry['memory'][kind] / 2**30:.1f} GiB"


def preset(entry: Entry) -> str:
    """Bits and tables."""
    method = entry["settings"]["method"]
    return f"{method['bits']}, {method['tables']}"


def on_the_cpu(name: str, batch: int | None = None) -> str:
    return f"{name} on the CPU" + ("" if batch is None else f", batch {batch}")


def both_ways(name: str) -> list[tuple[Entry, Entry]]:
    """Entries over the link, each with that of the CPU."""
    found = entries(name)
    pairs = []
    for label, entry in found.items():
        method, _, batch = label.partition(", batch ")
        if entry["settings"]["attend"] == "link" and method != "dense":
            pairs.append((entry, found[on_the_cpu(method, int(batch) if batch else None)]))
    return pairs


def alone_rows() -> list[Row]:
    found = entries(ALONE)
    return [
        (f"`{name}`", f"{ms(x):.1f} ms", f"{ms(found['dense']) / ms(x):.1f}x", f"{mb(x):.0f} MB",
         f"{x['link_gb_per_s']:.0f}", f"{x['percent_of_dense']:.1f}%", gib(x, "state"))
        for name, x in found.items()
    ]  # fmt: skip


def batch_rows() -> list[Row]:
    return [
        (str(link["batch"]), f"{preset(link)}, {link['settings']['method']['share']}",
         f"{ms(link):.1f} ms", f"{link['tokens_per_second']:.1f}", f"{link['link_gb_per_s']:.0f}", f"{ms(cpu):.1f} ms",
         f"{cpu['tokens_per_second']:.1f}", gib(link, "host_kv"),
         f"{link['settings']['device_bytes'] / 2**30:.1f} GiB", gib(link, "state"))
        for link, cpu in both_ways(BATCHES)
    ]  # fmt: skip


def peak_gb(*given: Entry) -> float:
    """Of GPU memory while decoding."""
    return max(float(entry["memory"]["decode_peak"]) for entry in given) / 1e9


def table_6_rows() -> list[Row]:
    rows = list[Row]()
    for (link, cpu), (pair, paper) in zip(both_ways(TABLE_6), PAPER.items(), strict=True):
        assert preset(link) == "{}, {}".format(*pair) and link["settings"]["method"]["share"] == "own"
        ways = (f"{ms(x):.1f} ms, {x['tokens_per_second']:.1f}, {x['link_gb_per_s']:.0f}" for x in (link, cpu))
        rows.append((preset(link), *", ".join(ways).split(", "), f"{peak_gb(link, cpu):.1f} GB", f"{paper:.2f}"))
    return rows


def long_rows() -> list[Row]:
    kinds = "host_kv", "device_kv", "staging", "state", "weights"
    return [
        (name, f"{ms(x):.1f} ms", f"{x['tokens_per_second']:.1f}", f"{mb(x):.0f} MB", f"{x['link_gb_per_s']:.0f}",
         *(gib(x, kind) for kind in kinds))
        for name, x in zip(("link", "CPU"), entries(LONG).values(), strict=True)
    ]  # fmt: skip


def prompt_rows() -> list[Row]:
    return [
        (x["settings"]["where"], f"{ms(x) / 1e3:.2f} s", layers(x), gib(x, "staging"), gib(x, "prefill_peak"))
        for x in entries(PROMPT).values()
    ]


QUANTITIES = {  # of targets -> words, what divides the record's numbers, decimals
    "microseconds": ("ms a token", 1000, 1),
    "speed over": ("speed over dense", 1, 1),
    "slowest step over median": ("slowest step over median", 1, 2),
}
TARGETS = {ALONE: "96K, one sequence", BATCHES: "96K", ANSWER: "4096 tokens after 128K"}


def best_rows(target: dict[str, Any]) -> list[Row]:
    """The best batch of all, which the record judges, and of those within 4 GiB."""
    rows = list[Row]()
    mine = [x for name, x in entries(BATCHES).items() if name.startswith((f"{target['of']}, ", f"{target['of']} on"))]
    for some in (mine, [x for x in mine if x["settings"]["device_bytes"] <= 4 << 30]):
        best = max(some, key=lambda entry: entry["tokens_per_second"])
        speed, limit = best["tokens_per_second"], best["settings"]["device_bytes"] >> 30
        way = " by the CPU" if best["settings"]["attend"] == "cpu" else ""
        shown = f"96K, {best['batch']} sequences, limit of {limit} GiB on the GPU, `{target['of']}`: tokens/s{way}"
        rows.append((shown, f"{target['bound']:g}", f"{speed:.1f}", "yes" if speed >= target["bound"] else "no"))
    assert rows[0][2:] == (f"{target['got']:.1f}", "yes" if target["reached"] else "no")
    return rows


def target_rows() -> list[Row]:
    rows = list[Row]()
    for name, shown in TARGETS.items():
        for target in case(name)["targets"]:
            if target["quantity"] == "best tokens/s":
                rows += best_rows(target)
                continue
            words, by, digits = QUANTITIES[target["quantity"]]
            reached = "yes" if target["reached"] else "no"
            numbers = f"{target['bound'] / by:g}", f"{target['got'] / by:.{digits}f}"
            rows.append((f"{shown}, `{target['of']}`: {words}", *numbers, reached))
    return rows


EXPECTED = {
    ("method", "ms a token", "speed", "from host memory", "GB/s of the step", "bytes of dense", "state on the GPU"):
        alone_rows,
    ("target", "wanted", "reached", "met"): target_rows,
    ("keys and values", "first token", "layers in host memory", "staging", "peak of GPU memory"): prompt_rows,
    ("sequences", "`bits`, `tables`, share", "link: a step", "tokens/s", "GB/s", "CPU: a step", "tokens/s",
     "host memory", "limit on the GPU", "tables on the GPU"): batch_rows,
    ("`bits`, `tables`", "link: a token", "tokens/s", "GB/s", "CPU: a token", "tokens/s", "GB/s", "GPU",
     "paper, tokens/s"): table_6_rows,
    ("attention", "a token", "tokens/s", "from host memory", "GB/s", "host memory", "GPU: keys and values", "staging",
     "tables", "weights"): long_rows,
}  # fmt: skip


def test_tables() -> None:
    found = dict(tables(PAGE))
    assert list(found) == list(EXPECTED)
    for head, rows in found.items():
        assert rows == EXPECTED[head](), head


def slower_on_the_cpu(cores: int) -> str:
    """Range over all cases on a host with so many cores of the CPU's time over the link's."""
    cases = [name for name in (ALONE, BATCHES, TABLE_6, LONG) if case(name)["device"]["threads"] == cores]
    ratios = [ms(cpu) / ms(link) for name in cases for link, cpu in both_ways(name)]
    return f"{min(ratios):.1f} to {max(ratios):.1f} times as long"


def layers(entry: Entry) -> str:
    """Of all, those in host memory."""
    memory = entry["memory"]
    return f"{memory['host_layers']} of {memory['host_layers'] + memory['device_layers']}"


def test_one_sequence() -> None:
    found = entries(ALONE)
    dense, group, own = found["dense"], found[GROUP], found[OWN]
    more, longer = mb(own) - mb(group), ms(own) - ms(group)
    (whole,) = {layers(entry) for entry in found.values()}
    assert found["quest"]["settings"]["method"]["dense_layers"] == [0, 1]
    shape, device = case(ALONE)["shape"], case(ALONE)["device"]
    assert device["name"] == "NVIDIA H200" and f"Its host has {device['threads']} cores" in WORDS
    assert f"**One sequence** of {shape['context']:,} keys" in WORDS and f"{whole} layers lie in host memory" in WORDS
    limits = {entry["settings"]["device_bytes"] for name in (ALONE, TABLE_6) for entry in entries(name).values()}
    assert limits == {4 << 30} and "limited to 4 GiB" in WORDS
    assert f"reads {mb(own) / mb(group):.1f} times the bytes of (10, 75) with `group` over the link" in WORDS
    assert f"These {more:.0f} MB more take {longer:.1f} ms longer, which is {more / longer:.0f} GB/s." in WORDS
    assert f"Dense attention reads at {dense['link_gb_per_s']:.0f} GB/s." in WORDS
    link = [mb(entry) / dense["link_gb_per_s"] for entry in (own, group)]
    rest = [ms(entry) - time for entry, time in zip((own, group), link, strict=True)]
    assert "the bytes of `own` take {:.1f} ms, and those of `group` {:.1f} ms".format(*link) in WORDS
    assert "is much the same: {:.1f} and {:.1f} ms.".format(*rest) in WORDS
    assert f"So 16 ms would need {mb(own) / (16 - rest[0]):.0f} GB/s over the link." in WORDS
    assert f"On a host with 16 cores that takes {slower_on_the_cpu(16)} as reading them over the link" in WORDS
    assert f"with 32 cores {slower_on_the_cpu(32)}" in WORDS


def test_more_sequences() -> None:
    found, dense = entries(BATCHES), entries(ALONE)["dense"]
    most = max(entry["batch"] for entry in found.values())
    (batches,) = [{*case(BATCHES)["host"]["batches"]}]
    assert most == max(batches) and not case(BATCHES)["left_out"]
    own = found[f"{OWN}, batch {most}"]
    assert f"with `own` reaches {own['tokens_per_second']:.1f} tokens/s in place of 120." in WORDS
    assert f"With {most} sequences it reads {mb(own):.0f} MB a step, at {own['link_gb_per_s']:.0f} GB/s." in WORDS
    needed = mb(own) / most * 120 / 1e3
    assert f"120 tokens/s would need {needed:.0f} GB/s, and dense attention gets {dense['link_gb_per_s']:.0f}." in WORDS
    each = own["memory"]["host_kv"] / 2**30 / most
    assert f"{most} sequences take {gib(own, 'host_kv')} of host memory." in WORDS
    assert f"12 sequences would take {12 * each:.1f} GiB." in WORDS
    assert {x["batch"] for x in found.values() if x["settings"]["device_bytes"] > 4 << 30} == {4, 8, 10}
    within = [x for x in found.values() if x["settings"]["device_bytes"] == 4 << 30]
    speed, count = max((x["tokens_per_second"], x["batch"]) for x in within)
    assert "Within 4 GiB the target of 120 tokens/s is missed." in WORDS and speed < 120
    assert f"Within 4 GiB the most is {speed:.1f} tokens/s, with {count} sequences." in WORDS
    cores = [case(name)["device"]["threads"] for name in (ALONE, BATCHES)]
    assert "on a host with {1} cores, the case of one sequence on one with {0}".format(*cores) in WORDS
    ways = (found[x]["tokens_per_second"] for x in (on_the_cpu(GROUP, most), f"{GROUP}, batch {most}"))
    text = "`group` gives {1:.1f} tokens/s with {0} sequences by the CPU, {2:.1f} over the link"
    assert text.format(most, *ways) in WORDS
    assert all(
        (ms(cpu) / ms(link) < 1.06) == (link["batch"] >= 4)
        for link, cpu in both_ways(BATCHES)
        if preset(link) == "10, 75"
    )


def test_table_6() -> None:
    pairs = both_ways(TABLE_6)
    over = [
        [way["tokens_per_second"] / paper for way, paper in zip(ways, PAPER.values(), strict=True)]
        for ways in zip(*pairs, strict=True)
    ]
    link, cpu = (f"{min(some):.1f} to {max(some):.1f} times" for some in over)
    assert f"Over the link these are {link} the paper's tokens per second, on the CPU {cpu}." in WORDS
    assert f"Its {PAPER[10, 150]} is one token in {1e3 / PAPER[10, 150]:.1f} ms" in WORDS
    peaks = [peak_gb(*ways) for ways in pairs]
    (small,) = (preset(link) for link, cpu in pairs if peak_gb(link, cpu) <= 24)
    above = sorted(peak for peak in peaks if peak > 24)
    assert f"Only ({small}) stays within the paper's 24 GB of GPU memory." in WORDS
    assert f"The others take {above[0]:.1f} to {above[-1]:.1f} GB, as tables lie on the GPU." in WORDS
    weights = pairs[0][0]["memory"]["weights"] / 1e9
    assert f"in GB: {weights:.1f} GB of weights, tables, and the keys and values on the GPU." in WORDS
    by_bytes = sorted((mb(entry), ms(entry)) for entry, _ in pairs)
    assert [time for _, time in by_bytes] == sorted(time for _, time in by_bytes)


def test_a_million_tokens_and_a_long_answer() -> None:
    (link, cpu), shape = entries(LONG).values(), case(LONG)["shape"]
    assert f"one sequence of {shape['context']:,} keys" in WORDS and shape["batch"] == 1
    assert f"a limit of {link['settings']['device_bytes'] >> 30} GiB on the GPU." in WORDS
    assert f"GPU. {layers(link)} layers lie in host memory" in WORDS
    peak = max(entry["memory"]["decode_peak"] for entry in (link, cpu))
    assert f"takes up to {peak / 2**30:.1f} GiB of GPU memory" in WORDS
    answer, (entry,) = case(ANSWER), entries(ANSWER).values()
    assert (
        f"{answer['generated']} tokens were generated after {answer['shape']['context'] >> 10}K keys, one sequence, "
        f"all in GPU memory (record `host`, case `{ANSWER}`). A token takes {ms(entry):.2f} ms in the median, and the "
        f"slowest {entry['slowest']['over_median']:.2f} times that." in " ".join(GPU.split())
    )


def test_the_page_on_host_memory() -> None:
    ((head, rows),) = tables((ROOT / "docs" / "host.md").read_text())
    assert head == ("method", "ms a token", "speed", "state on the GPU")
    assert rows == [(*row[:3], row[-1]) for row in alone_rows() if "CPU" not in row[0]]
    best = entries(BATCHES)[f"{GROUP}, batch 10"]
    limit = best["settings"]["device_bytes"] / 2**30
    assert (
        f"With 10 sequences `{GROUP}` gives {best['tokens_per_second']:.1f} tokens/s. Keys and values then take "
        f"{gib(best, 'host_kv')} of host memory, and {limit:.1f} GiB on the GPU with staging; its tables take "
        f"{gib(best, 'state')} more there." in HOST_PAGE
    )
    long = entries(LONG)[GROUP]
    assert (
        f"sequence of 1M keys and 48 GiB on the GPU a token takes {ms(long):.1f} ms, and tables take "
        f"{gib(long, 'state')} more." in HOST_PAGE
    )
    assert f"host has 16 cores, a step takes {slower_on_the_cpu(16)} on the CPU as over the link" in HOST_PAGE
    assert f"with 32 cores {slower_on_the_cpu(32)}" in HOST_PAGE


def test_the_first_token() -> None:
    """Keys of the other cases are put into the cache by `bench.host.fill`."""
    found, (staged, plain) = case(PROMPT), entries(PROMPT).values()
    assert found["device"]["name"] == "NVIDIA H100 80GB HBM3" and found["dirty"] is False
    assert {preset(x) for x in (staged, plain)} == {"10, 75"} and staged["settings"]["device_bytes"] == 4 << 30
    passes = (
        f"{found['shape']['context']:,} random tokens is read in passes of {staged['settings']['prefill_chunk_size']}"
    )
    assert f"A prompt of {passes} tokens, on one H100 with the same limit (case `{PROMPT}`" in WORDS
    assert (
        f"one H100 (case `{PROMPT}`): with staging the first token comes after {ms(staged) / 1e3:.2f} s, and without "
        f"host memory after {ms(plain) / 1e3:.2f} s." in HOST_PAGE
    )


def test_the_time_of_compiling_is_the_same_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    with patch("longreach.ops.impl.has_numba", lambda: True):
        tell_compiled(CacheConfig(host=True), torch.device("cuda"), LEAST)
    (told,) = capsys.readouterr().err.splitlines()
    assert "for up to a minute; --host-attend link avoids this" in told
    assert "compiles kernels, for up to a minute." in HOST_PAGE


def test_the_performance_log() -> None:
    alone, batches = entries(ALONE), entries(BATCHES)
    dense, group, own = (alone[name] for name in ("dense", GROUP, OWN))
    best = {name: batches[f"{name}, batch 10"] for name in (GROUP, OWN)}
    places = layers(group), layers(best[GROUP]).split()[0]
    assert "{} layers lie in host memory with one sequence, and {} with 10.".format(*places) in LOG
    speed = dense["link_gb_per_s"]
    assert f"Found: {ms(group):.1f} and {ms(dense):.1f} ms. Dense attention reads at {speed:.0f} GB/s." in LOG
    reached = [f"{best[name]['tokens_per_second']:.1f} tokens/s" for name in (GROUP, OWN)]
    assert f"Found at batch 10: {reached[0]}. A step then reads {best[GROUP]['link_gb_per_s']:.0f} GB/s" in LOG
    rate = (mb(own) - mb(group)) / (ms(own) - ms(group))
    assert f"It reads {mb(own) / mb(group):.1f} times the bytes of (10, 75) with `group`" in LOG
    assert f"the bytes more come at {rate:.0f} GB/s. It takes {ms(own):.1f} ms (target 16)" in LOG
    assert f"and gives {reached[1]} at batch 10 (target 120)." in LOG
    few, many = (
        [cpu["link_gb_per_s"] for name in names for _, cpu in both_ways(name)]
        for names in ((ALONE, TABLE_6, LONG), (BATCHES,))
    )
    assert f"whole steps: {min(few):.0f} to {max(few):.0f} GB/s. A step takes {slower_on_the_cpu(16)}" in LOG
    assert f"32 cores reach up to {max(many):.0f} GB/s, and a step takes {slower_on_the_cpu(32)}" in LOG


def test_cases_of_the_benchmark() -> None:
    for name, found in record("host")["cases"].items():
        (line,) = [
            line for line in (ROOT / "benchmarks" / "README.md").read_text().splitlines() if f"| `{name}` |" in line
        ]
        assert f"| {found['shape']['context']:,} |" in line, name
    batches = ", ".join(map(str, (1, *case(BATCHES)["host"]["batches"])))
    assert f"| {batches}; `dense` 1 | 4 GiB, more if the batch needs it |" in BENCHMARKS
