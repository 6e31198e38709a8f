"""Load records for a report and check every field that it uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longreach.errors import InvalidInput
from longreach.records.record import read
from longreach.records.report.attention_shape import ATTENTION, check_attention
from longreach.records.report.fusion_shape import FUSION, FUSION_CONFIG, check_fusion
from longreach.records.report.routing_shape import ROUTING, ROUTING_CONFIG, check_routing
from longreach.records.report.sampling_shape import STUDY, STUDY_CONFIG, check_sampling
from longreach.records.report.schema import Each, Items, Maybe, Mismatch, Number, Perhaps, check

FORMAT = 1
VERBS = {
    "eval": "longreach eval",
    "perplexity": "longreach perplexity",
    "fidelity": "longreach compare",
    "attention": "longreach attention",
    "fusion": "longreach fusion",
    "sampling": "longreach sampling",
    "mka routing": "longreach mka routing",
}

SHARE, COUNT = Number(0, 1), Number(0, 1 << 62)
READS = Maybe({"total": COUNT, "keys": COUNT, "values": COUNT, "metadata": COUNT})
SECONDS = {"read": Maybe(COUNT), "per_token": Maybe(COUNT)}
METHOD = {"name": str}
ABOUT = {
    "model": {"name": str, "sha256": str, "dtype": str, "parameters": int, "context": Maybe(int)},
    "config": dict,
    "commit": Maybe(str),
    "dirty": Maybe(bool),
    "python": str,
    "versions": Each(Maybe(str)),
    "device": {"type": str, "name": str, "threads": int},
}
FUSE = {"name": str, "ratio": Perhaps(SHARE)}
METHODS = {"methods": Each({"prefill": METHOD, "decode": METHOD, "fuse": Perhaps(FUSE), "evict": Perhaps(METHOD)},
                           least=1)}  # fmt: skip
ANSWER = {"number": int, "draw": int, "text": str, "score": SHARE, "tokens": int, "diverges_at": Maybe(int),
          "error": Maybe(str)}  # fmt: skip
PART = {"score": SHARE, "interval_95": Items(SHARE, exactly=2), "samples": int}
BECAME = {name: COUNT for name in ("tokens", "exact", "recomputed", "reused", "computed")}
SAMPLING = {"layers": Items(int, least=1), "search": COUNT, "attention": COUNT, "sampled_head": Items(SHARE),
            "sampled_group": Items(SHARE), "overflowed": Items(SHARE),
            "tables_over_kv": Perhaps(COUNT),
            "table_share": Perhaps(COUNT)}  # older records: of the layer with the largest tables  # fmt: skip
ERROR_BARS = {"layers": Items(int, least=1), "relative_error": Items(COUNT), "redone": Items(SHARE),
              "bytes": Perhaps(COUNT)}  # fmt: skip
RESULT = {
    "score": SHARE,
    "interval_95": Items(SHARE, exactly=2),
    "failed": int,
    "alone": Perhaps(int),
    "answers": Items(ANSWER),
    "length_over_dense": Maybe(COUNT),
    "prefill_reads": READS,
    "decode_reads": READS,
    "ran": Perhaps(Each(Items(str))),
    "not_captured": Perhaps(Maybe(str)),
    "seconds": SECONDS,
    "by": Perhaps(Each(Each(PART))),
    "kept": Perhaps(Maybe({"right": int, "kept": int})),
    "fusion": Perhaps(BECAME),
    "sampling": Perhaps(SAMPLING),
    "error_bars": Perhaps(ERROR_BARS),
}
SAMPLE = {"number": int, "tokens": int, "expected": Items(str), "facts": dict}
TASK = {
    "task": Perhaps(str),
    "length": Perhaps(int),
    "source": str,
    "characters_per_token": COUNT,
    "samples": Items(SAMPLE, least=1),
    "results": Each(RESULT),
}
CURVE = Items({"start": int, "stop": int, "nll": Maybe(Number()), "tokens": int})
NLL = {"perplexity": Maybe(Number()), "nll": Maybe(Number()), "tokens": int, "by_position": CURVE,
       "interval_95": Perhaps(Maybe(Items(Number(), exactly=2)))}  # fmt: skip
PERPLEXITY = {"prefill": NLL, "decode": Maybe(NLL), "prefill_reads": READS, "decode_reads": READS,
              "seconds": SECONDS}  # fmt: skip
HEADS = Items(Items(Maybe(Number()), least=1), least=1)
FIDELITY = {
    "kl": Maybe(Number()),
    "kl_steps": Items(Maybe(Number())),
    "first_divergence": Maybe(int),
    "steps": int,
    "prefill_reads": READS,
    "decode_reads": READS,
    "seconds": SECONDS,
    "layer_error": Maybe({"mean": HEADS, "max": HEADS}),
    "prefill_layer_error": Perhaps(Maybe({"mean": HEADS, "max": HEADS, "rows": int})),
    "sampling": Perhaps(SAMPLING),
    "error_bars": Perhaps(ERROR_BARS),
}
LENGTH = {"config": {"length": int, "lengths": Perhaps(Items(int, least=1))}}
KINDS: dict[str, dict[str, Any]] = {
    "eval": {**ABOUT, **METHODS, **LENGTH, "tasks": Each(TASK, least=1)},
    "perplexity": {**ABOUT, **METHODS, **LENGTH, "files": Items({"name": str, "tokens": int, "sha256": str}, least=1),
                   "results": Each(PERPLEXITY, least=1),
                   "failed": Perhaps(Items({"method": str, "window": int, "error": str}))},
    "fidelity": {**ABOUT, **METHODS, "results": Each(FIDELITY, least=1)},
    "attention": {**ABOUT, **LENGTH, **ATTENTION},
    "fusion": {**ABOUT, **METHODS, **FUSION, "config": FUSION_CONFIG},
    "sampling": {**ABOUT, **STUDY, "config": STUDY_CONFIG},
    "mka routing": {**ABOUT, **ROUTING, "config": ROUTING_CONFIG},
}  # fmt: skip


@dataclass(frozen=True)
class Record:
    """A checked record. name: its file name, used in the report."""

    name: str
    kind: str
    content: dict[str, Any]

    def __getitem__(self, field: str) -> Any:
        return self.content[field]

    @property
    def labels(self) -> list[str]:
        """Its methods, in their order."""
        return list(self.content["methods"])

    @property
    def dense(self) -> str | None:
        """The label of dense attention in both phases, with all tokens computed and kept, if it was measured."""
        found = [
            k for k, m in self.content["methods"].items()
            if m["prefill"]["name"] == m["decode"]["name"] == "dense" and not ("fuse" in m or "evict" in m)
        ]  # fmt: skip
        return found[0] if found else None

    @property
    def lengths(self) -> list[int]:
        """Lengths in tokens from the config, of the prompt or of prompt and answer. Several if tasks ran at several."""
        config = self.content["config"]
        found = config.get("lengths", [config.get("length", config.get("prompt_tokens"))])
        return [length for length in found if isinstance(length, int)]


def load_all(paths: Sequence[Path]) -> list[Record]:
    """Each file once, in order; files of one name go by their paths. Raises InvalidInput as `load` does."""
    once = list({path.resolve(): path for path in paths}.values())
    if not once:
        raise InvalidInput(
            "no records; name some that longreach eval, perplexity, compare, attention, fusion, sampling or mka "
            "routing wrote (--output)"
        )
    names = [path.name for path in once]
    return [load(path, path.name if names.count(path.name) == 1 else str(path)) for path in once]


def load(path: Path, name: str | None = None) -> Record:
    """A record that a report can be made of.

    Raises InvalidInput where the file cannot be read, is no JSON, or is a record of another kind, of another format or
    with a field missing or of another shape.
    """
    try:
        content = read(path)
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}; check the path") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is no JSON ({error}); restore it, or measure it again") from error
    kind, version = (content.get("kind"), content.get("format")) if isinstance(content, dict) else (None, None)
    if not isinstance(kind, str) or kind not in KINDS:
        came = f"a record of kind {kind!r}" if kind is not None else "no record that names its kind"
        raise InvalidInput(f"{path} is {came}; a report reads records of {', '.join(VERBS.values())} (--output)")
    again = f"measure it again with {VERBS[kind]} --output"
    if version != FORMAT or isinstance(version, bool):
        raise InvalidInput(
            f"{path} is of format {version!r}, this longreach reads format {FORMAT}; {again}, or make the report with "
            f"the version of longreach that wrote it"
        )
    try:
        check(content, KINDS[kind])
        if kind == "attention":
            check_attention(content["results"])
        elif kind == "fusion":
            check_fusion(content)
        elif kind == "sampling":
            check_sampling(content["results"])
        elif kind == "mka routing":
            check_routing(content["results"])
        else:
            _check_labels(content)
    except Mismatch as error:
        raise InvalidInput(f"{path}: {error}; it is no whole record of {VERBS[kind]}: {again}") from error
    return Record(name or path.name, kind, content)


def _check_labels(content: dict[str, Any]) -> None:
    """Check that results belong to listed methods and answers to listed samples."""
    methods = content["methods"]
    results = [t["results"] for t in content["tasks"].values()] if content["kind"] == "eval" else [content["results"]]
    for label in (label for each in results for label in each):
        if label not in methods:
            raise Mismatch(f"methods.{label} is missing, of which there are results")
    for name, task in content.get("tasks", {}).items():
        numbers = {sample["number"] for sample in task["samples"]}
        for label in methods:
            if label not in task["results"]:
                raise Mismatch(f"tasks.{name}.results.{label} is missing")
            for answer in task["results"][label]["answers"]:
                if answer["number"] not in numbers:
                    raise Mismatch(f"tasks.{name}: sample {answer['number']} is missing, which {label} answers")
