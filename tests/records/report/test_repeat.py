"""The commands in the report are ones that `longreach` takes, with the record's settings."""

from __future__ import annotations

import json
import shlex
from typing import Any

from longreach.cli.main import build_parser
from longreach.evals.methods import parse
from longreach.records.report.blocks import Code, Text
from longreach.records.report.repeat import repeat
from tests.records.report import factory
from tests.records.report.factory import evaluation, only, record_of, scored


def test_the_command_says_what_the_config_says() -> None:
    content = factory.small()
    content["config"].update(temperature=0.5, draws=3, no_graph=True, limit=None)
    content["tasks"] |= {name: scored({"dense": 1, **dict.fromkeys(list(factory.METHODS)[1:], 1)})
                         for name in ("qa_1", "longbench_qasper", "longbench_gov_report")}  # fmt: skip
    command, config = (b.text for b in repeat([record_of(content)]) if isinstance(b, Code))
    program, *words = shlex.split(command.replace("\\\n", " "))
    args = build_parser().parse_args(words)
    assert program == "longreach" and args.verb == "eval"
    assert args.tasks == "niah_single_1,vt,qa_1=FILE,longbench=FILE"
    assert args.method == list(factory.METHODS) and args.graph is False
    assert (args.length, args.samples, args.seed, args.batch, args.draws) == ((4096,), 4, 0, 1, 3)
    assert (args.temperature, args.prefill_chunk_size, args.limit) == (0.5, 512, None)
    assert (args.model, args.device, args.dtype) == ("DIRECTORY", "cpu", "float32")
    assert json.loads(config) == {"config": content["config"], "methods": content["methods"]}


def test_the_shipped_model_is_named_and_dirt_is_told() -> None:
    content = evaluation(factory.small()["tasks"], dirty=True)
    content["model"]["name"] = "longreach-mini"
    found = repeat([record_of(content)])
    assert "--model mini" in next(b.text for b in found if isinstance(b, Code))
    assert "with changes that are in no commit" in only(found, Text).text


def arguments(content: dict[str, Any]) -> Any:
    command = next(b.text for b in repeat([record_of(content)]) if isinstance(b, Code))
    return build_parser().parse_args(shlex.split(command.replace("\\\n", " "))[1:])


def test_the_command_of_perplexity() -> None:
    content = factory.perplexity()
    content["config"] = {"length": 2048, "decode_tokens": 0, "windows": 3, "limit": 3, "prefill_chunk_size": 256}
    args = arguments(content)
    assert (args.verb, args.length, args.decode_tokens, args.limit, args.prefill_chunk_size) == (
        "perplexity", 2048, 0, 3, 256,
    )  # fmt: skip
    assert [str(path) for path in args.text] == ["book.txt"] and args.method == list(factory.METHODS)


def test_the_command_of_mka_routing() -> None:
    args = arguments(factory.routing())
    assert (args.verb, args.action, args.model, args.length, args.limit) == ("mka", "routing", "DIRECTORY", 16, 3)
    assert [str(path) for path in args.text] == ["book.txt"] and args.device == "cpu"


def test_the_command_of_compare_has_all_options_of_methods() -> None:
    content = factory.fidelity()
    content["config"] = {"prompt_tokens": 900, "steps": 8, "layers": True, "prefill_chunk_size": 512,
                         "document": "my notes.txt", "question": "Who 'slept'?"}  # fmt: skip
    labels = ["streaming_llm/streaming_llm window=7 prefill.window=0.25", "oracle_top_k k=0.1 dense_layers=[0,1]"]
    content["methods"] |= {f"method {n}": parse(label).to_json() for n, label in enumerate(labels)}
    args = arguments(content)
    assert (args.verb, args.document, args.question, args.steps, args.layers) == (
        "compare", "my notes.txt", "Who 'slept'?", 8, True,
    )  # fmt: skip
    assert [parse(m).to_json() for m in args.method[3:]] == [parse(label).to_json() for label in labels]


def test_the_command_of_fusion() -> None:
    content = factory.fusion()
    args = arguments(content)
    assert (args.verb, args.tasks, args.length, args.samples, args.seed) == ("fusion", "vt,qa_1=FILE", 1024, 1, 0)
    assert (args.chunk_tokens, args.chunks, args.prefill_chunk_size) == (256, "bos", 512)
    assert args.method == list(content["methods"])


def test_the_command_of_attention() -> None:
    content = factory.attention()
    args = arguments(content)
    assert args.verb == "attention" and (args.length, args.samples, args.rows, args.seed) == (4096, 2, 9, 0)
    config = [b.text for b in repeat([record_of(content)]) if isinstance(b, Code)][1]
    assert json.loads(config) == {"config": content["config"]}


def test_the_command_of_sampling() -> None:
    content = factory.sampling()
    content["config"]["ablations"] = False
    args = arguments(content)
    assert (args.verb, args.tasks, args.length, args.samples, args.rows, args.seed) == (
        "sampling", "vt,cwe", 4096, 1, 4, 0,
    )  # fmt: skip
    assert args.centre == 1024 and args.ablations is False
    content["config"]["ablations"] = True
    assert arguments(content).ablations is True
