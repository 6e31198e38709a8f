"""`longreach run`: answers, shared documents, chat templates, stops, what is reported."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTIONS = ("What is the code for the barn?", "Who slept?")
TOKENS = 12


def generated(directory: Path, prompt: str, special: bool = True) -> tuple[list[int], list[int], str]:
    """(prompt, answer without the end, its text) as transformers itself gives them, greedily."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=special).input_ids
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
    new = out[0, ids.shape[1] :].tolist()
    return ids[0].tolist(), new, tokenizer.decode(new, skip_special_tokens=True).strip()


def plain(document: Path, question: str) -> str:
    return f"{document.read_text().rstrip()}\n\nQuestion: {question}\nAnswer:"


def asked(model: Path, document: Path | str, *questions: str) -> list[Any]:
    named = [x for q in questions for x in ("--question", q)]
    return ["run", "--model", model, "--document", document, "--max-new-tokens", TOKENS, *named]


def stopping(tiny: Path, folder: Path, **generation: Any) -> Path:
    """The same model with other stops in its generation config."""
    model = shutil.copytree(tiny, folder / "model")
    file = model / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **generation}))
    return model


def test_answers_are_those_of_transformers_and_the_document_is_read_once(
    longreach: Any, tiny: Path, document: Path
) -> None:
    result = longreach(*asked(tiny, document, *QUESTIONS), "--json", "--prefill-chunk-size", 32)
    assert result.code == 0 and result.err == ""
    found = json.loads(result.out)
    rows = found["document_tokens"]
    for question, answer in zip(QUESTIONS, found["answers"], strict=True):
        ids, new, text = generated(tiny, plain(document, question))
        assert answer["question"] == question and answer["answer"] == text
        assert answer["prompt_tokens"] == len(ids) and answer["tokens"] == len(new)
        rows += answer["prompt_tokens"] - found["document_tokens"]
    layers = found["report"]["layers"]
    assert {layer["rows"] for layer in layers if layer["phase"] == "prefill"} == {rows}
    assert found["document_tokens"] > len(document.read_text())
    assert found["report"]["prefill"] == found["report"]["decode"] == 1.0
    first = found["answers"][0]
    assert first["time_to_first_token"] == found["document_seconds"] + first["first_token_seconds"]
    assert found["versions"]["torch"] == torch.__version__ and found["device"]["type"] == "cpu"


def test_answers_stream_to_standard_output_and_the_rest_goes_to_standard_error(
    longreach: Any, tiny: Path, document: Path
) -> None:
    texts = [generated(tiny, plain(document, q))[2] for q in QUESTIONS]
    one = longreach(*asked(tiny, document, QUESTIONS[0]))
    assert one.code == 0 and one.out.strip() == texts[0]
    two = longreach(*asked(tiny, document, *QUESTIONS))
    head, _, tail = two.out.partition(f"> {QUESTIONS[1]}\n")
    assert head.removeprefix(f"> {QUESTIONS[0]}\n").strip() == texts[0] and tail.strip() == texts[1]
    summary = " ".join(two.err.split())
    assert "Read 100.0% in prefill (dense) and 100.0% in decode (dense)" in summary
    assert f"(cut after {TOKENS} tokens; --max-new-tokens allows more)" in summary
    assert "a token. Setting up the decode step took" in summary
    brief = " ".join(longreach(*asked(tiny, document, QUESTIONS[0]), "--max-new-tokens", 2).err.split())
    assert "First token after" in brief and ", then " not in brief, "the only step loaded code"
    assert all(len(line) <= 80 for line in two.err.splitlines())


def test_what_a_method_reads_of_the_prompt_is_named(longreach: Any, tiny: Path, document: Path) -> None:
    said = " ".join(longreach(*asked(tiny, document, QUESTIONS[0]), "--decode", "mac window=16 band=8").err.split())
    assert (
        "in prefill (dense, and what mac needs of the prompt) and " in said and " in decode (mac) of the bytes" in said
    )


def test_a_phase_that_a_method_left_dense_says_why(longreach: Any, tiny: Path, document: Path) -> None:
    both = "--prefill", "kascade", "--decode", "kascade"
    said = " ".join(longreach(*asked(tiny, document, QUESTIONS[0]), *both).err.split())
    assert "in prefill (kascade, dense: no kascade plan yet: it is calibrated on this prompt" in said
    assert "in decode (kascade, dense: no kascade plan: the prompt has " in said


def test_a_chat_template_is_used_and_shared_exactly(longreach: Any, tiny_chat: Path, document: Path) -> None:
    found = json.loads(longreach(*asked(tiny_chat, document, *QUESTIONS), "--json").out)
    tokenizer = AutoTokenizer.from_pretrained(tiny_chat)
    for question, answer in zip(QUESTIONS, found["answers"], strict=True):
        turn = [{"role": "user", "content": f"{document.read_text().rstrip()}\n\n{question}"}]
        chat = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        assert chat.startswith("<s>[user]The brown hen")
        ids, _, text = generated(tiny_chat, chat, special=False)
        assert answer["answer"] == text and answer["prompt_tokens"] == len(ids)
    assert found["document_tokens"] == len("[user]") + 1 + len(document.read_text().rstrip()) + len("\n\n")


def test_methods_and_their_options_are_used_and_reported(longreach: Any, tiny: Path, document: Path) -> None:
    arguments = asked(tiny, document, QUESTIONS[0])
    options = ["--set", "decode.window=8", "--set", "decode.sinks=2", "--set", "prefill.window=0.5"]
    methods = ["--prefill", "streaming_llm", "--decode", "streaming_llm"]
    found = json.loads(longreach(*arguments, *methods, *options, "--json").out)
    assert found["decode"] == {"name": "streaming_llm", "sinks": 2, "window": 8}
    assert found["prefill"] == {"name": "streaming_llm", "sinks": 4, "window": 0.5}
    start, steps = found["answers"][0]["prompt_tokens"], found["answers"][0]["tokens"] - 1
    seen = [start + i + 1 for i in range(steps)]  # keys that the i-th decode step may see
    assert found["report"]["decode"] == pytest.approx(10 * steps / sum(seen))
    assert 0.5 < found["report"]["prefill"] < 0.6  # half of what each row sees, and the sinks
    summary = " ".join(longreach(*arguments, *methods, *options).err.split())
    assert f"{found['report']['decode']:.1%} in decode (streaming_llm)" in summary


def test_it_stops_at_every_stop_token_of_the_generation_config(
    longreach: Any, tiny: Path, document: Path, tmp_path: Path
) -> None:
    _, new, _ = generated(tiny, plain(document, QUESTIONS[0]))
    stop = next(t for i, t in enumerate(new) if i >= 2 and t not in new[:i])
    model = stopping(tiny, tmp_path, eos_token_id=[258, stop])
    answer = json.loads(longreach(*asked(model, document, QUESTIONS[0]), "--json").out)["answers"][0]
    assert answer["tokens"] == new.index(stop) and answer["stopped"]
    first = stopping(tiny, tmp_path / "first", eos_token_id=[new[0]])
    result = longreach(*asked(first, document, QUESTIONS[0]))
    assert result.out == "\n" and "no answer: the model stopped at once" in result.err
    assert "Read 100.0% in prefill (dense) of the bytes" in " ".join(result.err.split())  # there was no decoding


def test_it_stops_at_stop_strings(longreach: Any, tiny: Path, document: Path, tmp_path: Path) -> None:
    _, _, text = generated(tiny, plain(document, QUESTIONS[0]))
    stop = text[3:5]
    model = stopping(tiny, tmp_path, stop_strings=[stop])
    answer = json.loads(longreach(*asked(model, document, QUESTIONS[0]), "--json").out)["answers"][0]
    assert answer["answer"] == text[: text.index(stop)].strip() and answer["stopped"]


def test_the_document_may_come_from_standard_input(
    longreach: Any, tiny: Path, document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(document.read_bytes())))
    piped = longreach(*asked(tiny, "-", QUESTIONS[0]))
    assert piped.code == 0 and piped.out == longreach(*asked(tiny, document, QUESTIONS[0])).out


def test_settings_of_the_checkpoint_that_are_not_applied_are_told(
    longreach: Any, tiny: Path, document: Path, tmp_path: Path
) -> None:
    plain_answer = json.loads(longreach(*asked(tiny, document, QUESTIONS[0]), "--json").out)["answers"][0]["answer"]
    model = stopping(tiny, tmp_path, repetition_penalty=1.3, do_sample=True, min_length=0, stop_strings=["@@"])
    result = longreach(*asked(model, document, QUESTIONS[0]), "--json")
    found = json.loads(result.out)
    assert found["not_applied"] == {"repetition_penalty": 1.3, "do_sample": True}
    assert found["answers"][0]["answer"] == plain_answer
    assert result.err.count("\n") == 1 and "not applied: repetition_penalty=1.3, do_sample=True" in result.err


@pytest.mark.parametrize("verb", ["compare", "eval"])
def test_records_say_which_settings_of_the_checkpoint_are_not_applied(
    longreach: Any, tiny: Path, document: Path, tmp_path: Path, verb: str
) -> None:
    model, record = stopping(tiny, tmp_path, no_repeat_ngram_size=2, bad_words_ids=[[7]]), tmp_path / "record.json"
    options = {
        "compare": ("--document", document, "--steps", 2, "--methods", "dense"),
        "eval": ("--tasks", "niah_single_1", "--length", 1500, "--samples", 1, "--method", "dense"),
    }
    result = longreach(verb, "--model", model, *options[verb], "--output", record)
    assert result.code == 0 and "not applied: no_repeat_ngram_size=2, bad_words_ids=[[7]]" in result.err
    config = json.loads(record.read_text())["config"]
    assert config["not_applied"] == {"no_repeat_ngram_size": 2, "bad_words_ids": "[[7]]"}


def test_a_plan_that_the_session_made_is_told(
    longreach: Any, tiny: Path, document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longreach.methods.loki.automatic.LokiMaker.needed", 16)
    first, second = (longreach(*asked(tiny, document, QUESTIONS[0]), "--decode", "loki") for _ in range(2))
    told = [" ".join(result.err.split()) for result in (first, second)]
    assert first.code == second.code == 0 and first.out == second.out
    assert "Loki plan made of" in told[0] and "Loki plan of an earlier session" in told[1]
    found = json.loads(longreach(*asked(tiny, document, QUESTIONS[0]), "--decode", "loki", "--json").out)
    assert [(plan["kind"], plan["source"]) for plan in found["report"]["plans"]] == [("loki", "cache")]
