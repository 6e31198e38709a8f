"""The text of the model card; its part on scores is in scores.py."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from longreach.records.report.format import one_line, percent
from longreach.records.report.reading import Record
from longreach.tasks.needle import ASKED, BEGUN, NEEDLE
from longreach.train.mini.card.format import commit, large, table, whole
from longreach.train.mini.card.inputs import DENSE, Inputs, TrainingRun
from longreach.train.mini.card.scores import evaluation, limits

HEAD = "---\nlicense: apache-2.0\nlanguage: en\nlibrary_name: transformers\npipeline_tag: text-generation\n---"
TITLES = {"prose_collected": "prose, characters"}  # of fields of corpus.json that do not name their unit
LOSSES = {"answer": "answer tokens", "text": "plain text"}  # of a log, and what they are of
CODE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "{folder}"  # this directory
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)

text = "The bridge was built of stone. {fact} It stands to this day."
question = "{question}"
inputs = tokenizer(f"{{text}}\\n\\n{{question}}", return_tensors="pt")
out = model.generate(**inputs, max_new_tokens=12, do_sample=False)
print(tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
```"""


def card(inputs: Inputs) -> str:
    """README.md; every figure in it comes from the inputs."""
    sections = (_about, _data, _training, evaluation, limits, _repeat)
    return "\n\n".join([HEAD, *(part for section in sections for part in section(inputs))]) + "\n"


def _about(inputs: Inputs) -> Iterator[str]:
    config, name = inputs.config, inputs.folder.name
    fill = {"attribute": "number", "key": "quiet lagoon", "value": "4821973"}
    yield f"# {one_line(name)}"
    yield (
        f"A decoder of the Llama architecture with {inputs.runs[-1]['parameters'] / 1e6:.1f} M parameters: "
        f"{config['num_hidden_layers']} layers of width {config['hidden_size']}, {config['num_attention_heads']} query "
        f"and {config['num_key_value_heads']} KV heads of {config['head_dim']}, feed-forward "
        f"{config['intermediate_size']}, {config['vocab_size']} tokens in the vocabulary, positions up to "
        f"{config['max_position_embeddings']}, {config['dtype']}."
    )
    yield (
        "It answers questions about what a long text states. It exists so that longreach can be tried and tested on a "
        "trained model without a download. It is no assistant and knows nothing of the world: it does a few tasks, in "
        "English and in the wordings that it was trained on, and is of no use but to test long-context methods."
    )
    yield "## Load it"
    yield CODE.format(
        folder=name, fact=NEEDLE.format(**fill), question=f"{ASKED.format(**fill)} {BEGUN.format(**fill)}"
    )


def _data(inputs: Inputs) -> Iterator[str]:
    corpus, seen = inputs.corpus, inputs.runs[-1].ended.tokens
    sources = corpus["sources"]
    more = _by_source(corpus)
    yield "## Data"
    yield (
        "Text and source code of the packages below, as installed, and tasks made by program: facts hidden in that "
        "text, with questions and answers. Hashes of what was read are in `corpus.json`."
    )
    yield table(
        ["package", "version", "licence", "files", *more],
        [[s["package"], s["version"], s["licence"], whole(s.get("files")),
          *(whole(column.get(s["package"])) for column in more.values())] for s in sources],
    )  # fmt: skip
    tokens = {kind: _total(count) for kind, count in corpus["tokens"].items()}
    held = sum(tokens.values())
    kinds = ", ".join(f"{count:,} of {kind}" for kind, count in tokens.items())
    again = ", so that the same text came again and again" if seen > held else ""
    yield (
        f"The corpus has {held:,} tokens ({kinds}). Training saw {large(seen)} tokens, those of tasks among them: "
        f"{seen / max(held, 1):,.1f} times as many as there are{again}. Do not expect language modelling beyond it."
    )
    window, hits = corpus["overlap_window"], corpus["overlap_hits"]
    places = "no place" if not hits else "1 place" if hits == 1 else f"{hits} places"
    yield (
        f"Overlap with the text that the evaluation hides facts in (SHA-256 `{corpus['haystack_sha256'][:16]}`): "
        f"{places} of the training text shared {window} characters with it."
    )


def _by_source(corpus: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What else corpus.json tells of each source: {title: {package: count}}."""
    packages = {s["package"] for s in corpus["sources"]}
    found: dict[str, dict[str, Any]] = {}
    for name, value in corpus.items():
        tables = {name: value, **{f"{k}, {name}": v for k, v in value.items()}} if isinstance(value, dict) else {}
        for title, counts in tables.items():
            if isinstance(counts, dict) and counts and set(counts) <= packages:
                found[TITLES.get(title, title.replace("_", " "))] = counts
    return found


def _total(count: Any) -> int:
    return sum(_total(c) for c in count.values()) if isinstance(count, dict) else int(count)


def _training(inputs: Inputs) -> Iterator[str]:
    yield "## Training"
    yield "![Losses over tokens seen, and accuracy](loss.png)"
    rows = []
    for number, run in enumerate(inputs.runs, 1):
        seconds, steps, tokens = (
            getattr(run.ended, name) - getattr(run.begun, name) for name in ("seconds", "steps", "tokens")
        )
        rows.append([f"{number}", f"{seconds / 60:.1f}", f"{steps:,}", large(tokens), _lengths(run), f"{run['seed']}",
                     run["device"]["name"], f"{run['versions'].get('torch')}", commit(run.content)])  # fmt: skip
    yield table(["run", "minutes", "steps", "tokens", "lengths", "seed", "device", "torch", "commit"], rows)
    last = inputs.runs[-1].curve[-1]
    losses = [f"{what} {last[field]:.2g}" for field, what in LOSSES.items() if field in last]
    told = f"{', '.join(losses)} nats a token"
    if last.get("forms"):
        told += "; right answer tokens by kind of sequence: " + ", ".join(
            f"{form} {percent(share)}" for form, share in last["forms"].items()
        )
    elif any(run.content.get("dev") for run in inputs.runs):
        told += "; exact answers: " + ", ".join(_dev(inputs.runs))
    yield f"The last losses noted: {told}."


def _dev(runs: Sequence[TrainingRun]) -> Iterator[str]:
    last = [point for run in runs for point in run.content.get("dev", [])][-1]["exact"]
    for what, share in last.items():
        if isinstance(share, dict):
            yield f"{what} " + ", ".join(f"{percent(one)} at {length}" for length, one in share.items())
        else:
            yield f"{percent(share)} at {what} tokens" if what.isdecimal() else f"{what} {percent(share)}"


def _lengths(run: TrainingRun) -> str:
    lengths = sorted({length for point in run.curve for length in point["lengths"]})
    return f"{lengths[0]} to {lengths[-1]}" if len(lengths) > 1 else f"{lengths[0]}"


def _repeat(inputs: Inputs) -> Iterator[str]:
    yield "## Repeat it"
    folders = [f"run{number}" for number in range(1, len(inputs.runs) + 1)]
    lines = ["longreach train mini --prepare data"]
    for number, (run, folder) in enumerate(zip(inputs.runs, folders, strict=True)):
        before = run["resume"] or {}
        fresh = before.get("began") == before.get("seconds")  # a schedule of its own, not the rest of another
        resume = ["--start" if fresh else "--resume", folders[number - 1]] if number else []
        if run["schedule"].get("name") not in (None, "grow"):
            resume += ["--schedule", run["schedule"]["name"]]
        words = ["longreach", "train", "mini", "--data", "data", "--out", folder, "--minutes", f"{run['minutes']:g}"]
        lines.append(shlex.join([*words, "--seed", f"{run['seed']}", *resume]))
    lines += [_command(record, folders[-1]) for record in inputs.records]
    words = ["longreach", "train", "mini", "--card", "--model", folders[-1], "--logs"]
    words += [*(f"{folder}/train.json" for folder in folders), "--records", *(r.name for r in inputs.records)]
    yield "\n".join(["```", *lines, shlex.join(words), "```"])
    yield (
        f"The same versions of the packages give the same corpus, tokenizer and prompts. Training ends by the clock, "
        f"so that its weights come out differently each time; those here hash to `{inputs.sha256[:16]}`."
    )


def _command(record: Record, model: str) -> str:
    config = record["config"]
    tasks = dict.fromkeys(task.get("task", name) for name, task in record["tasks"].items())
    words = ["longreach", "eval", "--model", model, "--device", record["device"]["type"], "--dtype",
             record["model"]["dtype"], "--tasks", ",".join(tasks),
             "--length", ",".join(map(str, record.lengths))]  # fmt: skip
    for name in ("samples", "limit", "seed", "temperature", "draws"):
        value = config.get(name)
        if value is not None and (name, value) not in (("temperature", 0), ("draws", 1)):
            words += [f"--{name}", f"{value}"]
    return shlex.join([*words, "--method", DENSE, "--output", record.name])
