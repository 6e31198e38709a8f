"""Counting what was read."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from longreach import A3, Quest, SnapKV
from longreach.errors import InvalidInput
from longreach.methods.base import Notes, Outcome
from longreach.methods.call import LayerCall
from longreach.ops import KVView, Lists, PackedLists, Partial, Rows, Selection, Spans, absolute, relative
from longreach.ops.doors import Later, Read
from longreach.ops.selection import Span
from longreach.runtime import Ledger, Report
from longreach.runtime.counting import entries_used
from longreach.testing.inputs import random_kv

VECTOR = 16 * 2  # bytes of a key: 16 channels of bf16
DENSE = Spans.dense()
EMPTY = Partial.empty(2, 4, 16)


def call(layer: int = 0, lengths: tuple[int, ...] = (10, 4)) -> LayerCall:
    """One new token for sequences of these lengths; 2 KV heads of 2 query heads."""
    kv = random_kv(lengths, heads=2, dim=16, dtype=torch.bfloat16)
    batch = torch.arange(len(lengths))
    rows = Rows(torch.randn(len(lengths), 4, 16).bfloat16(), batch, kv.seq_lens - 1)
    return LayerCall(layer, rows, kv, batch, 0.25)


class Step(NamedTuple):
    """What a layer of a pass read: passes over keys, over values (both in one, if the same), bytes of metadata."""

    keys: tuple[Selection, ...] = ()
    values: tuple[Selection, ...] = ()
    metadata: Any = 0
    why: str | None = None
    counted: torch.Tensor | None = None
    notes: Notes | None = None


def add(ledger: Ledger, now: LayerCall, step: Step, *, phase: Any = "decode", dense: Selection = DENSE,
        name: str = "some", impl: str = "reference") -> None:  # fmt: skip
    """Count a layer of a pass that is under way."""
    now = now.observer()
    values = list(step.values)
    for selection in step.keys:
        both = any(selection is v for v in values)
        if both:
            values = [v for v in values if v is not selection]
        now.count_read(Read.of(now.kv, selection, values=both, counted=step.counted))
    for selection in values:
        now.count_read(Read.of(now.kv, selection, keys=False))
    if isinstance(step.metadata, Later):
        now.count_read(Read(other=step.metadata))
    elif not isinstance(step.metadata, int) or step.metadata:
        now.read_bytes(step.metadata)
    now.meter.kernels_used.add(impl)
    ledger.add(phase, now, name, Outcome(EMPTY, step.why, step.notes), dense)


def committed(ledger: Ledger) -> Report:
    """The report after the pass under way has ended."""
    ledger.commit()
    return ledger.report()


def reported(*steps: Step) -> Any:
    """The report of one layer in several passes."""
    ledger = Ledger()
    for made in steps:
        add(ledger, call(), made)
        ledger.commit()
    (layer,) = committed(ledger).layers
    return layer


def test_each_pass_over_a_key_or_value_counts() -> None:
    """14 keys are seen, in each of 2 KV heads."""
    window = Spans.window(3)
    layer = reported(Step((DENSE,), (DENSE,)))
    assert layer.key_bytes == layer.value_bytes == 14 * 2 * VECTOR and layer.dense_bytes == 28 * 2 * VECTOR
    assert layer.fraction == 1.0 and layer.bytes_read == layer.dense_bytes
    layer = reported(Step((DENSE, DENSE, window), (window,)))
    assert layer.key_bytes == (14 + 14 + 6) * 2 * VECTOR and layer.value_bytes == 6 * 2 * VECTOR
    assert layer.fraction == 40 / 28
    assert reported(Step()).bytes_read == 0


def test_a_group_of_query_heads_streams_its_keys_once() -> None:
    starts = torch.tensor([[2, 8, 5, 5], [0, 4, 9, 9]])  # per query head; heads 0, 1 and 2, 3 share a KV head
    spans = Spans((Span(absolute(starts), relative(1)),), per="query")
    layer = reported(Step((spans,), (spans,)))
    assert layer.key_bytes == (8 + 5 + 4 + 0) * VECTOR


def test_metadata_may_differ_from_row_to_row() -> None:
    assert reported(Step(metadata=100)).metadata_bytes == 100
    assert reported(Step(metadata=torch.tensor([30, 12]))).metadata_bytes == 42
    with pytest.raises(InvalidInput, match=r"amount: expected int \[R=2\].*got float32"):
        reported(Step(metadata=torch.tensor([0.5, 0.25])))


def test_a_list_is_read_once_by_each_pass_over_keys() -> None:
    """Entries in use, for each row and KV head, beside 32 bytes a key; what stands behind them is not read."""
    count = torch.tensor([[3, 1], [2, 0]])
    lists = Lists(torch.arange(3, dtype=torch.int32).expand(2, 2, 3), count)
    assert reported(Step((lists,), (lists,))).metadata_bytes == 6 * 4
    assert reported(Step((DENSE, lists, lists), (lists,), 5)).metadata_bytes == 2 * 6 * 4 + 5
    assert reported(Step((), (lists,))).metadata_bytes == 6 * 4
    weighed = replace(lists, index=lists.index.long(), log_weight=torch.zeros(2, 2, 3, dtype=torch.bfloat16))
    assert reported(Step((weighed,), (weighed,))).metadata_bytes == 6 * (8 + 2)
    for_all = Lists(lists.index[:, :1], count[:, :1])
    assert reported(Step((for_all,), (for_all,))).metadata_bytes == 2 * 5 * 4
    shared = replace(lists, row_to_list=torch.tensor([0, 0]))
    assert reported(Step((shared,), (shared,))).metadata_bytes == 2 * 4 * 4
    mapped = replace(lists, head_map=torch.tensor([0, 0]))  # both heads read the first list: 3 entries, then 2
    assert reported(Step((mapped,), (mapped,))).metadata_bytes == 2 * (3 + 2) * 4
    one_for_all = replace(for_all, head_map=torch.tensor([0, 0]))
    assert reported(Step((one_for_all,), (one_for_all,))).metadata_bytes == 2 * 5 * 4
    over = replace(lists, count=torch.tensor([[4, 1], [2, 0]]))
    assert reported(Step((over,), (over,))).metadata_bytes == 3 * 4
    blocks = replace(lists, block=2)
    assert reported(Step((blocks,), (blocks,))).metadata_bytes == 6 * 4
    packed = PackedLists(torch.tensor([0, 1, 2, 0, 0, 1]), torch.tensor([0, 3, 4, 6, 6]), heads=2)
    assert reported(Step((packed,), (packed,))).metadata_bytes == 6 * 8


def test_entries_that_do_not_count_are_not_read() -> None:
    """Poisoned with slots there are not, the result stays as it is; one in use changes it."""
    now, index = call(), torch.tensor([[[5, 1, 2]], [[3, 0, 1]]])
    lists = Lists(index, torch.tensor([[2], [1]]))
    assert int(entries_used(lists, now.kv).sum()) == 3 * 2
    spare = torch.tensor([[[5, 1, 999]], [[3, -7, 999]]])
    assert torch.equal(now.attend(replace(lists, index=spare)).out, now.attend(lists).out)
    other = index.clone()
    other[1, 0, 0] = 2
    assert not torch.equal(now.attend(replace(lists, index=other)).out, now.attend(lists).out)


def test_lists_that_overflow_are_counted_once_and_read_densely() -> None:
    lists = Lists(torch.tensor([[[1, 0]], [[2, 1]]]), torch.tensor([[3], [2]]))
    layer = reported(Step((lists,), (lists,)))
    assert layer.overflowed_lists == 1 and layer.key_bytes == (10 + 2) * 2 * VECTOR
    assert "1 lists overflowed and read densely" in str(Report((layer,)))


def test_lists_in_sight_count_as_others_do() -> None:
    """Of several layers of one pass that share lists, each through a head map of its own; overflow included."""
    now = call()
    index = torch.tensor([[[3, 1, 2], [0, 1, 2]], [[3, 0, 1], [0, 1, 2]]], dtype=torch.int32)
    for count, of in (([[3, 1], [2, 0]], None), ([[4, 1], [2, 9]], None), ([[1, 2], [0, 1]], torch.tensor([1, 0]))):
        lists = Lists(index, torch.tensor(count), row_to_list=of)
        maps = [None, torch.tensor([1, 0]), torch.tensor([1, 1]), None]
        found = []
        for sighted in (True, False):
            ledger = Ledger()
            for layer, head_of in enumerate(maps):
                used = replace(lists, head_map=head_of, all_visible=sighted)
                reads = [((used,), (used,)), ((DENSE,), (used,)), ((used, DENSE), (DENSE, used)), ((used, used), ())]
                add(ledger, replace(now, layer=layer), Step(*reads[layer]))
            found.append(committed(ledger))
        assert found[0] == found[1]


def test_packed_lists_in_sight_count_as_others_do() -> None:
    tiles = torch.tensor([1, 0])
    packed = PackedLists(torch.tensor([0, 1, 2, 0, 0, 1]), torch.tensor([0, 3, 4, 6, 6]), heads=2, row_to_list=tiles)
    for more in ({}, {"head_map": torch.tensor([1, 0])}):
        lists = replace(packed, **more)  # type: ignore[arg-type]
        sighted = replace(lists, all_visible=True)
        assert reported(Step((sighted,), (sighted,), 3)) == reported(Step((lists,), (lists,), 3))


@pytest.mark.parametrize("kind", ["lists", "spans", "counted", "blocks", "deferred"])
def test_a_pass_is_counted_by_few_ops_however_many_layers_it_has(kind: str) -> None:
    """They are launched in each step."""

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not any(view in str(func) for view in ("view", "select", "expand", "slice", "detach", "unflatten")):
                ops.append(str(func))
            return func(*args, **(kwargs or {}))

    now, ops, launched = call(), list[str](), list[int]()
    lists = Lists(torch.zeros(2, 2, 1, dtype=torch.int32), torch.ones(2, 2, dtype=torch.int64), all_visible=True)
    spans = Spans((Span(absolute(torch.tensor([[1], [0]])), relative(1)),))
    for layers in (3, 30):
        ledger = Ledger()
        for _ in range(2):  # the second pass finds its sums and coefficients
            ops.clear()
            made = [
                {
                    "lists": Step((replace(lists, head_map=torch.tensor([n % 2, 0])),) * 2, (DENSE,)),
                    "spans": Step((spans,), (spans,), 5),
                    "counted": Step((spans,), (spans,), torch.tensor([4, n]), counted=torch.full((2, 2), n)),
                    "blocks": Step((replace(lists, count=lists.count + n, block=4),), (), 9),
                    "deferred": Step((), (), Later(tripled, (torch.tensor([4, n]),), (now.rows.pos,))),
                }[kind]
                for n in range(layers)
            ]
            with Counted():
                for n, step in enumerate(made):
                    add(ledger, replace(now, layer=n), step)
                ledger.commit()
        launched.append(len(ops))
    assert launched[0] == launched[1] <= 40, ops


@pytest.mark.parametrize("block", [1, 3, 4])
def test_visible_blocks_count_as_others_do(block: int) -> None:
    """The newest block, which the row cuts, is among them."""
    now = call(lengths=(30, 6))
    newest = now.rows.pos // block
    index = torch.stack([torch.stack([torch.zeros_like(newest), newest], -1)] * 2, 1).int()
    lists = Lists(index, torch.tensor([[2, 2], [2, 2]]), block=block)
    reports = []
    for sighted in (True, False):
        ledger = Ledger()
        used = replace(lists, all_visible=sighted)
        add(ledger, now, Step((used,), (used,)))
        reports.append(committed(ledger))
        assert torch.equal(used.keys_read(now.rows, now.kv), lists.keys_read(now.rows, now.kv))
    assert reports[0] == reports[1]


def test_complete_blocks_count_as_others_do() -> None:
    """The row's own block is not among them, or the row is its last key."""
    now = call(lengths=(30, 6))
    index = torch.tensor([[[0, 3], [2, 1]], [[0, -9], [1, -9]]], dtype=torch.int32)  # row 1 at 5 ends block 1
    count = torch.tensor([[2, 1], [0, 1]])
    found = []
    for sighted in (True, False):
        ledger, lists = Ledger(), Lists(index, count, block=3, all_visible=sighted, complete=sighted)
        add(ledger, now, Step((lists,), (lists,)))
        found.append(committed(ledger))
        assert lists.keys_read(now.rows, now.kv).tolist() == [[6, 3], [0, 3]]
    assert found[0] == found[1]


def test_steps_add_up() -> None:
    ledger = Ledger()
    for _ in range(3):
        add(ledger, call(1), Step((DENSE,), (DENSE,), 7, "short"))
    add(ledger, call(0), Step())
    add(ledger, call(1), Step((DENSE,), ()), phase="prefill", name="other", impl="triton")
    add(ledger, call(1), Step((DENSE,), (DENSE,), 7, "early"))
    layers = committed(ledger).layers
    assert [(r.phase, r.layer) for r in layers] == [("prefill", 1), ("decode", 0), ("decode", 1)]
    last = layers[2]
    assert (last.steps, last.rows, last.metadata_bytes) == (4, 8, 28)
    assert last.key_bytes == 4 * 14 * 2 * VECTOR and last.dense_reasons == ("early", "short")
    assert last.dense_counts == (1, 3)
    assert last.dense_notes == ("dense for 1 of 4 steps: early", "dense for 3 of 4 steps: short")
    assert (layers[0].method, layers[0].impl) == ("other", "triton")


def test_a_report_in_the_middle_of_a_pass_is_that_of_whole_passes() -> None:
    """The pass goes on: rows that do not count stay so, layers are counted together."""
    asked, plain = Ledger(), Ledger()
    made = Step((DENSE,), (DENSE,), 7)._replace(notes=notes_of(torch.ones(2, 4)))
    for ledger in (asked, plain):
        for _ in range(2):
            before = ledger.report()
            ledger.mask_rows(torch.tensor([False, True]))
            for layer in range(3):
                add(ledger, call(layer), made)
                ledger.add_observer("decode", call(layer), Quest())
                assert ledger is plain or ledger.report() == before
            ledger.commit()
    assert asked.report() == plain.report()
    assert {layer.steps for layer in asked.report().layers} == {2} and len(asked._sums) == 1


def test_rows_of_prompts_count_while_decoding_rows_are_masked() -> None:
    """In one pass with both, of as many rows, and an observer of the prompts."""
    made = Step((DENSE,), (DENSE,), torch.tensor([30, 12]))._replace(notes=notes_of(torch.ones(2, 4)))
    masked, plain = Ledger(), Ledger()
    masked.mask_rows(torch.tensor([False, True]))
    for ledger in (masked, plain):
        add(ledger, call(), made)
        add(ledger, call(), made, phase="prefill")
        watched = call().observer()
        watched.count_read(Read(DENSE, 2, 3, 4))
        ledger.add_observer("prefill", watched, Quest())
    prompt, decoded = committed(masked).layers
    assert prompt == committed(plain).layers[0]
    assert masked.report(Quest()).layers[0] == plain.report(Quest()).layers[0]
    assert (prompt.rows, prompt.metadata_bytes, decoded.rows, decoded.metadata_bytes) == (2, 42, 1, 30)
    assert decoded.key_bytes == 10 * 2 * VECTOR and prompt.key_bytes == 14 * 2 * VECTOR
    assert prompt.notes is not None and decoded.notes is not None
    assert (prompt.notes["sums"], decoded.notes["sums"]) == ([[2.0, 4.0]] * 4, [[1.0, 2.0]] * 4)


def test_reads_that_the_host_counted_need_no_op_and_are_in_reports_of_all_methods() -> None:
    """Of methods that choose; those of an observer are in the reports for it alone."""
    ledger, ops = Ledger(), list[str]()
    add(ledger, call(), Step((DENSE,), (DENSE,)), phase="prefill")

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ops.append(str(op))
            return op(*args, **kwargs or {})

    made = call()
    with Seen():
        for who, count in ((A3(), 5), (A3(), 6), (SnapKV(), 100), (Quest(), 1000)):
            one = made.observer()
            one.count_read(Read(DENSE, 2, 3, 4, counted=count))
            ledger.add_observer("prefill", one, who)
    assert not ops
    ledger.commit()
    plain, (quest,) = ledger.report().layers[0], ledger.report(Quest()).layers
    exact = 2 * (10 + 4) * VECTOR
    assert (plain.key_bytes, plain.value_bytes, plain.metadata_bytes) == (exact + 222, exact + 333, 444)
    assert plain.method == "some+a3+snapkv" and plain.dense_bytes == 2 * exact and plain.rows == 2
    assert (quest.key_bytes, quest.method) == (exact + 2222, "some+a3+snapkv+quest")
    ledger.add_eviction(call(), SnapKV())
    ledger.reset()
    assert not ledger.report().layers


def test_a_pass_in_which_counting_starts_from_zero_counts_whole() -> None:
    ledger, plain = Ledger(), Ledger()
    add(ledger, call(), Step((DENSE,), (DENSE,)))
    ledger.commit()
    for one in (ledger, plain):
        one.mask_rows(torch.tensor([False, True]))
        for layer in range(3):
            add(one, call(layer), Step((DENSE,), (DENSE,)))
            if one is ledger and layer == 1:
                one.reset()
        one.commit()
    assert ledger.report() == plain.report() and len(ledger.report().layers) == 3


def test_what_exact_attention_reads_is_the_measure() -> None:
    """In a sliding-window layer that is the window."""
    ledger, window = Ledger(), Spans.window(4)
    add(ledger, call(), Step((window,), (window,), 0, "sliding window of 4"), dense=window, name="dense")
    (layer,) = committed(ledger).layers
    assert layer.fraction == 1.0 and layer.dense_bytes == 8 * 2 * 2 * VECTOR


def test_a_report_can_be_printed_and_written() -> None:
    ledger = Ledger()
    for layer in (0, 1):
        window = Spans.window(1 + layer)
        add(ledger, call(layer), Step((window,), (window,), 56), name="streaming_llm")
    add(ledger, call(), Step((DENSE,), (DENSE,), why="too short"), phase="prefill", name="dense")
    report = committed(ledger)
    assert str(report).splitlines() == [
        "phase    layer  method          impl                  rows        K        V     meta  of dense  note",
        "prefill      0  dense           reference                2    50.0%    50.0%     0.0%    100.0%  "
        "dense: too short",
        "decode       0  streaming_llm   reference                2     7.1%     7.1%     3.1%     17.4%",
        "decode       1  streaming_llm   reference                2    14.3%    14.3%     3.1%     31.7%",
        "prefill: 100.0% of the bytes that dense attention reads",
        "decode: 24.6% of the bytes that dense attention reads",
    ]
    written = json.loads(json.dumps(report.to_json()))
    assert written["prefill"] == 1.0 and written["decode"] == report.fraction("decode")
    first = written["layers"][1]
    assert first["key_bytes"] == 4 * VECTOR and first["metadata_bytes"] == 56
    assert first["fraction"] == first["bytes_read"] / first["dense_bytes"] == (8 * VECTOR + 56) / (56 * VECTOR)
    assert written["layers"][0]["dense_reasons"] == ["too short"]


def test_nothing_to_report() -> None:
    empty = Ledger().report()
    assert empty.layers == () and empty.fraction() is None
    assert empty.to_json() == {"prefill": None, "decode": None, "layers": []}
    ledger = Ledger()
    add(ledger, call(lengths=()), Step((DENSE,), (DENSE,)), name="dense")
    report = committed(ledger)
    assert report.layers[0].fraction == 0.0 and report.fraction("decode") is None
    assert "dense" in str(report)


def test_sums_made_in_inference_mode_go_on_outside() -> None:
    ledger = Ledger()
    with torch.inference_mode():
        add(ledger, call(), Step((DENSE,), (DENSE,)))
    with torch.no_grad():
        add(ledger, call(), Step((DENSE,), (DENSE,)))
    assert committed(ledger).layers[0].steps == 2


@pytest.mark.parametrize("per", ["kv", "query"])
@pytest.mark.parametrize("metadata", [100, None])
def test_adding_needs_no_value_from_the_device(per: Any, metadata: Any) -> None:
    """Fake tensors have none: whatever waits for the device would raise."""
    with FakeTensorMode():
        batch, heads = 3, 2 if per == "kv" else 4
        k = torch.empty(3, 2, 20, 16)
        ints = torch.ones(3, dtype=torch.int64)
        rows = Rows(torch.empty(3, 4, 16), ints, ints)
        now = LayerCall(0, rows, KVView(k, k, ints), ints, 0.25)
        bound = torch.ones(batch, heads, dtype=torch.int64)
        spans = Spans((Span(absolute(0), absolute(4)), Span(relative(bound), relative(1))), per)
        lists = Lists(torch.ones(batch, heads, 5, dtype=torch.int64), bound, per=per)
        ledger = Ledger()
        made = Step((DENSE, spans), (lists,), ints if metadata is None else metadata)
        for _ in range(2):
            add(ledger, now, made, impl="triton")
            ledger.commit()
    assert ledger.tallies["decode", 0, None].steps == 2


def test_streams_that_a_kernel_counted_are_taken_as_they_are() -> None:
    """Layers that count alike and others in one pass: each gets its own columns."""
    starts = torch.tensor([[2, 8, 5, 5], [0, 4, 3, 3]])
    spans = Spans((Span(absolute(starts), relative(1)),), per="query")
    given = call()
    keys, metadata = spans.keys_read(given.rows, given.kv).int(), torch.tensor([[3, 4], [5, 6]])
    plain = Step((spans,), (spans,), metadata)._replace(counted=keys)
    ledger, slow = Ledger(), Ledger()
    for _ in range(3):
        for where, made in ((ledger, plain), (slow, plain._replace(counted=None))):
            for layer, this in enumerate((made, Step((DENSE,), (DENSE,)), made)):
                add(where, call(layer), this)
            where.commit()
    for got, want in zip(committed(ledger).layers, committed(slow).layers, strict=True):
        assert got == want and got.dense_bytes == 3 * 28 * 2 * VECTOR
    assert got.metadata_bytes == 54 and got.key_bytes == 3 * int(keys.sum()) * VECTOR


def notes_of(x: torch.Tensor) -> Notes:
    return Notes((x,), twice, as_lists)


def twice(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, 2 * x], -1)


def as_lists(sums: torch.Tensor, rows: int) -> dict[str, Any]:
    return {"sums": sums.tolist(), "rows": rows, "note": f"{rows} rows noted"}


def test_what_a_method_notes_is_added_up_and_summarised() -> None:
    ledger = Ledger()
    for step in range(2):
        for layer in range(2):
            x = torch.full((2, 4), float(step + 10 * layer))
            x[1] += torch.arange(4)
            add(ledger, call(layer), Step((DENSE,))._replace(notes=notes_of(x)))
        add(ledger, call(2), Step((DENSE,)), name="other")
        ledger.commit()
    first, second, without = (layer.notes for layer in committed(ledger).layers)
    assert without is None and first is not None and second is not None
    assert first["sums"] == [[2.0 + 2 * h, 4.0 + 4 * h] for h in range(4)] and first["rows"] == 4
    assert second["sums"][0] == [42.0, 84.0]
    report = committed(ledger)
    assert "4 rows noted" in str(report)
    rows = report.to_json()["layers"]
    assert rows[0]["notes"] == first and "notes" not in rows[2]
    json.dumps(rows)
    ledger.reset()
    assert committed(ledger).layers == ()
    add(ledger, call(), Step((DENSE,))._replace(notes=notes_of(x)))
    (layer,) = committed(ledger).layers
    assert layer.notes is not None and layer.notes["sums"][0] == [22.0, 44.0]


def tripled(numbers: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """Of layers' numbers [L, R] and positions [R]."""
    return 3 * numbers + pos


def test_deferred_bytes_are_those_of_each_layer() -> None:
    """Two functions and two tensors of the pass; rows that have ended are left out."""
    now, pos, calls = call(lengths=(10, 4)), torch.tensor([9, 3]), list[tuple[int, ...]]()

    def doubled(numbers: torch.Tensor, some: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(numbers.shape))
        return 2 * numbers + some

    laters = [Later(doubled if n != 2 else tripled, (torch.tensor([n, 7]),), (pos,)) for n in range(4)]
    laters.append(Later(doubled, (torch.tensor([1, 1]),), (torch.tensor([100, 0]),)))
    for ended in (None, torch.tensor([False, True])):
        ledger = Ledger()
        if ended is not None:
            ledger.mask_rows(ended)
        for n, later in enumerate(laters):
            add(ledger, replace(now, layer=n), Step(metadata=later))
        want = [later.now() if ended is None else later.now()[:1] for later in laters]
        calls.clear()
        assert [layer.metadata_bytes for layer in committed(ledger).layers] == [int(x.sum()) for x in want]
        assert sorted(calls) == [(1, 2), (3, 2)]


def test_only_rows_that_are_live_count() -> None:
    """However they are counted: as if the others had not been there."""
    live = torch.tensor([True, False])
    both, kept = call(lengths=(10, 4)), call(lengths=(10,))
    index = torch.tensor([[[3, 1, 2], [0, 1, 2]], [[3, 0, 1], [0, 1, 2]]], dtype=torch.int32)
    lists = Lists(index, torch.tensor([[3, 1], [2, 0]]))
    seen = replace(lists, all_visible=True, head_map=torch.tensor([1, 0]))
    bounds = torch.tensor([[2, 8, 5, 5], [0, 4, 3, 3]])
    x = torch.arange(8.0).view(2, 4)

    def one(given: Lists) -> Lists:
        return replace(given, index=given.index[:1], count=given.count[:1])

    def spans(some: torch.Tensor) -> Spans:
        return Spans((Span(absolute(some), relative(1)),), per="query")

    def made(rows: slice) -> list[Outcome]:
        own, entries = spans(bounds[rows]), torch.tensor([[3, 4], [5, 6]])[rows]
        here = [lists, seen] if rows.stop is None else [one(lists), one(seen)]
        read = own.keys_read(*((both.rows, both.kv) if rows.stop is None else (kept.rows, kept.kv)))
        return [
            Step((DENSE,), (own,), torch.tensor([30, 12])[rows]),
            Step((here[0],), (here[0],), 40 if rows.stop is None else 20),
            Step((here[1],), (here[1],)),
            Step((own,), (own,), entries)._replace(counted=read.int()),
            Step((DENSE,), (DENSE,))._replace(notes=notes_of(x[rows])),
        ]

    ledger, alone = Ledger(), Ledger()
    for _ in range(2):
        ledger.mask_rows(~live)
        for layer, (mine, theirs) in enumerate(zip(made(slice(None)), made(slice(1)), strict=True)):
            add(ledger, replace(both, layer=layer), mine)
            add(alone, replace(kept, layer=layer), theirs)
        ledger.commit()
        alone.commit()
    assert committed(ledger) == committed(alone)
    assert [layer.rows for layer in committed(ledger).layers] == [2] * 5
    add(ledger, both, Step((DENSE,), (DENSE,)), impl="")  # the next pass counts all its rows
    assert committed(ledger).layers[0].rows == 4
