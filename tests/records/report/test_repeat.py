"""The command in the report is one that `longreach eval` takes."""

from __future__ import annotations

import json
import shlex

from longreach.cli.main import build_parser
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
    assert (args.length, args.samples, args.seed, args.batch, args.draws) == (4096, 4, 0, 1, 3)
    assert (args.temperature, args.prefill_chunk_size, args.limit) == (0.5, 512, None)
    assert (args.model, args.device, args.dtype) == ("DIRECTORY", "cpu", "float32")
    assert json.loads(config) == {"config": content["config"], "methods": content["methods"]}


def test_the_shipped_model_is_named_and_dirt_is_told() -> None:
    content = evaluation(factory.small()["tasks"], dirty=True)
    content["model"]["name"] = "longreach-mini"
    found = repeat([record_of(content)])
    assert "--model mini" in next(b.text for b in found if isinstance(b, Code))
    assert "with changes that are in no commit" in only(found, Text).text


def test_other_kinds_show_their_config() -> None:
    (code,) = [b for b in repeat([record_of(factory.fidelity())]) if isinstance(b, Code)]
    assert json.loads(code.text)["config"]["prefill_chunk_size"] == 512
