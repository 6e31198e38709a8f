"""Bad input: exit code 2, one line that says what came and what to do, nothing on standard output."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

from longreach.adapters.transformers import attach, load

RUN = ["run", "--model", "{tiny}", "--document", "{document}", "--question", "Who slept?"]
COMPARE = ["compare", "--model", "{tiny}", "--document", "{document}"]


def refused(result: Any, *words: str) -> None:
    """The command was refused in one line that holds these words."""
    assert result.code == 2 and result.out == ""
    assert result.err.count("\n") == 1 and result.err.startswith("longreach"), result.err
    for word in words:
        assert word in result.err, result.err


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([*RUN, "--decode", "quset"], ["unknown decode method 'quset'", "dense, streaming_llm, oracle_top_k"]),
        ([*RUN, "--prefill", "oracle_top_k"], ["unknown prefill method", "known: dense, streaming_llm"]),
        ([*RUN, "--decode", "streaming_llm", "--set", "decode.windw=3"], ["'windw'", "known: sinks, window"]),
        ([*RUN, "--decode", "streaming_llm", "--set", "decode.window=2.5"], ["window", "fraction", "2.5"]),
        ([*RUN, "--decode", "oracle_top_k", "--set", "decode.dense_layers=[0, 9]"], ["dense_layers", "got layer 9"]),
        ([*RUN, "--set", "decode.window=3"], ["option of dense", "'window'"]),
        ([*RUN, "--set", "layers.window=3"], ["unknown slot", "known: fuse, prefill, evict, decode"]),
        ([*RUN, "--set", "window=3"], ["SLOT.OPTION=VALUE"]),
        ([*RUN, "--question", "  "], ["--question is empty"]),
        ([*RUN, "--max-new-tokens", "0"], ["at least 1", "--max-new-tokens"]),
        ([*RUN, "--prefill-chunk-size", "-1"], ["at least 1", "--prefill-chunk-size"]),
        ([*RUN, "--dtype", "int8"], ["--dtype", "bfloat16"]),
        ([*RUN, "--device", "gpu"], ["'gpu'", "'cpu', 'cuda'"]),
        ([*RUN, "--device", "meta"], ["'meta'", "'cpu' and 'cuda'"]),
        ([*COMPARE, "--methods", "dense,quset"], ["unknown method 'quset'", "known: dense, streaming_llm"]),
        ([*COMPARE, "--methods", ","], ["no methods to compare", "name some of dense"]),
        ([*COMPARE, "--set", "quset.k=1"], ["unknown method in --set 'quset'"]),
        ([*COMPARE, "--set", "oracle_top_k.dense_layers=[7]"], ["dense_layers", "got layer 7"]),
        ([*COMPARE, "--methods", "dense", "--set", "streaming_llm.window=3"], ["streaming_llm", "not compared"]),
        ([*COMPARE, "--set", "streaming_llm.k=3"], ["option of streaming_llm 'k'", "known: sinks, window"]),
        ([*COMPARE, "--question", ""], ["--question is empty"]),
        ([*COMPARE, "--steps", "none"], ["whole number", "--steps"]),
        (["demo", "--length", "100"], ["no room for 3 facts"]),
        (["demo", "--length", "99999"], ["context is 16384 tokens"]),
        (["train", "mini"], ["--prepare DIR or --data DIR"]),
        (["train", "mini", "--workers", "0"], ["at least 1"]),
    ],
)
def test_arguments(longreach: Any, tiny: Path, document: Path, arguments: list[str], words: list[str]) -> None:
    refused(longreach(*(a.format(tiny=tiny, document=document) for a in arguments)), *words)


@pytest.mark.parametrize(
    "content, words",
    [
        (None, ["cannot read", "No such file", "--document"]),
        (b"", ["is empty"]),
        (b" \n ", ["is empty"]),
        (b"\xff\xfe\x00", ["not UTF-8 text", "iconv"]),
    ],
)
@pytest.mark.parametrize("verb", ["run", "compare"])
def test_documents(
    longreach: Any, tiny: Path, tmp_path: Path, verb: str, content: bytes | None, words: list[str]
) -> None:
    path = tmp_path / "document.txt"
    if content is not None:
        path.write_bytes(content)
    refused(longreach(verb, "--model", tiny, "--document", path, "--question", "Who?"), str(path), *words)


@pytest.mark.parametrize("verb", ["run", "compare"])
@pytest.mark.parametrize("given", ["--document", "--documents"])
def test_a_question_that_is_no_utf8(longreach: Any, tiny: Path, document: Path, given: str, verb: str) -> None:
    result = longreach(verb, "--model", tiny, given, document, "--question", "\udcff what")
    refused(result, "question", "bytes that are not UTF-8")


@pytest.mark.parametrize("verb", ["run", "compare"])
def test_a_document_longer_than_the_context(longreach: Any, tiny: Path, tmp_path: Path, verb: str) -> None:
    path = tmp_path / "long.txt"
    path.write_text("word " * 1000)
    room = ["--max-new-tokens", 20] if verb == "run" else ["--steps", 20]
    result = longreach(verb, "--model", tiny, "--document", path, "--question", "Who?", *room)
    tokens = 1 + len(("word " * 1000).rstrip() + "\n\nQuestion: Who?\nAnswer:")
    over = f"shorten the document by {tokens + 20 - 4096} tokens"
    refused(result, f"document and question are {tokens} tokens", "may take 20", "context is 4096 tokens", over)


@pytest.mark.parametrize("verb", ["run", "compare"])
def test_documents_longer_than_the_context_are_refused_before_chunks_are_computed(
    longreach: Any, tiny: Path, tmp_path: Path, verb: str
) -> None:
    path, store = tmp_path / "long.txt", tmp_path / "store"
    path.write_text("word " * 812)
    for new, question in ((40, "Who?"), (1, "who " * 20)):
        room = ["--max-new-tokens", new] if verb == "run" else ["--steps", new]
        result = longreach(verb, "--model", tiny, "--documents", path, "--question", question, "--store", store, *room)
        refused(result, "the documents are 4060 tokens", "context is 4096 tokens; shorten the documents by")
        assert not [*store.rglob("*.safetensors")]


def test_cuda_asked_for_where_there_is_none(
    longreach: Any, tiny: Path, document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ["run", "--model", tiny, "--document", document, "--question", "Who?"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(longreach(*run, "--device", "cuda"), "CUDA was requested", "--device cpu")
    refused(longreach("demo", "--device", "cuda"), "CUDA was requested", "--device cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    refused(longreach(*run, "--device", "cuda:1"), "'cuda:1' does not exist", "1 GPUs")


def cut(name: str, share: float) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        content = (model / name).read_bytes()
        (model / name).write_bytes(content[: int(len(content) * share)])

    return change


def config(**fields: Any) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        known = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**known, **fields}))

    return change


def removed(*names: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        for name in names:
            (model / name).unlink()

    return change


@pytest.mark.parametrize(
    "change, words",
    [
        (removed("config.json"), ["no model directory", "config.json"]),
        (removed("model.safetensors"), ["no model.safetensors"]),
        (removed("tokenizer.json", "tokenizer_config.json"), ["its tokenizer could not be loaded"]),
        (cut("model.safetensors", 0.5), ["model.safetensors is truncated", "fetch it again"]),
        (cut("model.safetensors", 0.0), ["model.safetensors is truncated"]),
        (cut("config.json", 0.5), ["its config and weights could not be loaded", "JSON"]),
        (cut("tokenizer.json", 0.5), ["its tokenizer could not be loaded"]),
        (cut("generation_config.json", 0.5), ["generation_config.json is no valid JSON"]),
        (config(num_hidden_layers=3), ["9 tensors", "missing from its weights", "model.layers.2."]),
        (config(intermediate_size=128), ["another shape", "mlp"]),
        (config(model_type="frobnitz"), ["could not be loaded", "frobnitz"]),
        (config(num_attention_heads=0), ["could not be loaded"]),
    ],
)
def test_model_directories(
    longreach: Any, tiny: Path, document: Path, tmp_path: Path, change: Callable[[Path], None], words: list[str]
) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    change(model)
    refused(longreach("run", "--model", model, "--document", document, "--question", "Who?"), str(model), *words)


def test_what_is_no_directory_at_all(longreach: Any, document: Path) -> None:
    for name in ("meta-llama/Llama-3.1-8B", str(document)):
        result = longreach("compare", "--model", name, "--document", document)
        refused(result, f"no model directory at {name}", "'mini'")


def test_weights_that_the_model_does_not_use_are_told(
    longreach: Any, tiny: Path, document: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    config(num_hidden_layers=1)(model)
    result = longreach("run", "--model", model, "--document", document, "--question", "Who?", "--max-new-tokens", 2)
    assert result.code == 0
    assert "longreach: warning: " in result.err and "model.layers.1.input_layernorm.weight" in result.err


def test_out_of_memory_in_prefill(longreach: Any, tiny: Path, document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = load(tiny)
    ids = torch.arange(20)[None]
    before = model(ids).logits
    forward, calls = modeling_llama.LlamaMLP.forward, []

    def short_of_memory(self: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        if len(calls) > 4:  # two layers a pass: the third pass fails
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return forward(self, x)

    for verb in (["run", "--question", "Who?"], ["compare", "--method", "streaming_llm"]):
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(modeling_llama.LlamaMLP, "forward", short_of_memory)
            patch.setattr(f"longreach.cli.{verb[0]}.load_model", lambda args: (model, tokenizer))
            result = longreach(*verb, "--model", tiny, "--document", document, "--prefill-chunk-size", 16)
        result = result._replace(out="")  # compare's table has begun by then
        refused(result, "memory ran out after 32 of", "16 at a time", "--prefill-chunk-size", "shorten the document")
        assert torch.equal(model(ids).logits, before)  # nothing stayed attached
        attach(model).close()


def test_a_model_that_does_not_fit(longreach: Any, tiny: Path, document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short_of_memory(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", short_of_memory)
    result = longreach("run", "--model", tiny, "--document", document, "--question", "Who?")
    refused(result, "does not fit into the memory of cpu", "--dtype bfloat16")


@pytest.mark.parametrize("option", ["--prefill", "--decode"])
def test_methods_are_checked_before_the_model_is_loaded(
    longreach: Any, document: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr("longreach.cli.run.load_model", lambda args: 1 / 0)
    refused(longreach("run", "--model", "x", "--document", document, "--question", "Q", option, "none"), "unknown")
