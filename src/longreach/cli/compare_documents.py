"""`longreach compare --documents`: what fusion and eviction change and save on your documents and question."""

from __future__ import annotations

import argparse
import hashlib
import sys
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from longreach.cli.common import (
    cache_config,
    check_questions,
    load_model,
    parse_settings,
    pass_tokens,
    read_system,
    read_whole,
    refuse_repeated,
    warn_unapplied,
)
from longreach.cli.compare_record import write_record
from longreach.cli.show import Column, Table, console, duration, emit, place, progress, show_memory, waiting
from longreach.cli.show_sampling import show_error_bars, show_sampling
from longreach.errors import InvalidInput

if TYPE_CHECKING:
    from longreach.evals.compare import Compare, Comparison

ONLY = ("system", "store", "chunk_tokens")  # arguments that belong to --documents
CHUNK_TOKENS = 512


def refuse_without_documents(args: argparse.Namespace) -> None:
    """Raise InvalidInput for an argument that belongs to --documents."""
    given = [f"--{name.replace('_', '-')}" for name in ONLY if getattr(args, name) is not None]
    if given:
        raise InvalidInput(f"{', '.join(given)}: a --document is kept whole; give --documents FILE instead")


def compare_documents(args: argparse.Namespace) -> int:
    texts = [read_whole(name, "to --documents") for name in args.documents]
    system = "" if args.system is None else read_system(args.system)
    check_questions([args.question])
    cache = cache_config(args)
    with ExitStack() as opened:
        with waiting("loading the model"):
            specs = _specs(args)
            from longreach.records import check_writable, environment

            if args.output is not None:
                check_writable(args.output)
            model, tokenizer = load_model(args)
            from longreach.adapters.transformers import Documents, attach
            from longreach.evals.compare import Compare
            from longreach.store import ChunkStore

            store = None if args.store is None else opened.enter_context(ChunkStore(args.store))
            where = environment(model.device)
        # no prompt is read here: the method decides only whether chunks get the dependence of their tokens
        needed = any(spec.fuse is not None and spec.fuse.needs_dependence for spec in specs)
        with attach(model, fuse="dependence" if needed else "pie") as session:
            documents = Documents(
                session, tokenizer, system=system, store=store, chunk_tokens=args.chunk_tokens or CHUNK_TOKENS,
                prefill_chunk=pass_tokens(args),
            )  # fmt: skip
            reserve = len(documents.question_tokens(args.question)) + args.steps
            with progress("reading documents", documents.count(texts)) as advance:
                documents.read(texts, advance, reserve=reserve)
            prompt = documents.prompt(args.question)
        for error in {str(origin.error) for origin in documents.origins if origin.error is not None}:
            print(f"longreach: the store could not be used, chunks were computed: {error}", file=sys.stderr)
        task = Compare(model, tokenizer, prompt.ids, steps=args.steps, specs=specs, layers=args.layers,
                       graph=args.graph, past_end=args.past_end, fused=prompt, cache=cache)  # fmt: skip
    warn_unapplied(task.not_applied)
    if args.json:
        found = list(task.run(args.prefill_chunk_size, progress))
        _record(args, model, task, found, where, texts, system)
        emit({**where, "prompt_tokens": len(task.prompt), "chunks": len(prompt.chunks),
              "not_applied": task.not_applied, "comparisons": [asdict(c) for c in found]})  # fmt: skip
        return 0
    found = _show(args, task, len(prompt.chunks))
    console().print(place(where))
    _record(args, model, task, found, where, texts, system)
    return 0


def _specs(args: argparse.Namespace) -> Any:
    """The methods to be compared, dense first: --method, or --methods as fusion methods, or all of those."""
    from longreach.evals.methods import NAMED
    from longreach.evals.methods import specs as parse_specs
    from longreach.methods.registry import FUSIONS, fusion_class

    given = parse_settings(args.set, "slot", NAMED)
    if args.method is not None and args.methods is not None:
        raise InvalidInput("--method already names methods: leave out --methods")
    texts = args.method
    refuse_repeated("--method", texts or ())
    if texts is None:
        names = list(FUSIONS) if args.methods is None else [n.strip() for n in args.methods.split(",") if n.strip()]
        if not names:
            raise InvalidInput(f"no methods to compare; name some of {', '.join(FUSIONS)}")
        refuse_repeated("--methods", names)
        for name in names:
            fusion_class(name)
        texts = [f"dense fuse={name}" for name in names]
    return parse_specs(texts, settings=given)


def _show(args: argparse.Namespace, task: Compare, chunks: int) -> list[Comparison]:
    out, found = console(), list[Any]()
    out.print(
        f"{len(task.prompt)} tokens of prompt with {chunks} chunks; each method is fed dense attention's own answer to "
        f"the same tokens, token by token.\n",
        soft_wrap=True,
    )
    width = max(18, *(min(34, len(spec.label)) for spec in task.specs))
    table = Table(out, [Column("method", width, left=True), Column("KL, 1st", 8), Column("KL", 8),
                        Column("diverges at", 11), Column("recomputed", 10), Column("exact", 7, wide=True),
                        Column("reused", 7, wide=True), Column("1st tok", 7), Column("per tok", 7)])  # fmt: skip
    table.header()
    for c in task.run(args.prefill_chunk_size, progress):
        found.append(c)
        became = ["-"] * 3
        if c.fusion is not None:
            became = [str(n) for n in (c.fusion.recomputed, c.fusion.exact, c.fusion.reused)]
        diverges = f"none in {c.steps}" if c.first_divergence is None else str(c.first_divergence)
        table.row([c.label, f"{c.kl_steps[0]:.2g}", f"{c.kl:.2g}", diverges, *became, duration(c.read_seconds),
                   duration(c.seconds_per_token)])  # fmt: skip
    out.print(
        f"\nKL: KL(dense || method) of the next-token distributions, in nats: of the first token after the prompt, and "
        f"mean of {found[0].steps} decode steps. diverges at: the first token of the answer, counted from 0, that the "
        f"method itself would have chosen differently. recomputed, exact, reused: stored tokens of the prompt. 1st "
        f"tok: time to the first token, the prompt read the second time. per tok: time per token after it."
    )
    show_sampling(out, {c.label: [c.sampling] for c in found})
    show_error_bars(out, {c.label: [c.error_bars] for c in found})
    show_memory(out, (c.memory for c in found))
    return found


def _record(
    args: argparse.Namespace, model: Any, task: Compare, found: list[Comparison], where: Any, texts: list[str],
    system: str,
) -> None:  # fmt: skip
    if args.output is None:
        return
    documents = [{"name": name, "sha256": _sha256(text)} for name, text in zip(args.documents, texts, strict=True)]
    config = {"documents": documents, "system": args.system, "system_sha256": _sha256(system) if system else None,
              "chunk_tokens": args.chunk_tokens or CHUNK_TOKENS}  # fmt: skip
    write_record(args, model, task, found, where, config)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
