"""Caches in files: loaded ones go on as if they had never been away, and what does not fit is refused in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open

from longreach import CacheConfig, attach, generate
from longreach.adapters.transformers import load as load_model
from longreach.errors import CapacityError, InvalidInput, Unsupported
from longreach.testing.tiny import save_tiny, tiny_model
from tests.adapters.transformers.mka.models import converted
from tests.adapters.transformers.reference import model_of, prompt
from tests.adapters.transformers.turns import CONFIGS, LENGTHS, METHODS, NEW, go_on, start
from tests.adapters.transformers.turns import plans_of_tests as plans_of_tests
from tests.adapters.transformers.turns import unwritten_is_nan as unwritten_is_nan
from tests.methods.planned import tiny

TURNS = ((1, 2, 3), (4, 5, 6))


@pytest.mark.filterwarnings("ignore:.* layers? whole at each step")
@pytest.mark.covering
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", METHODS)
def test_a_loaded_cache_goes_on_with_the_same_tokens(name: str, config: str, tmp_path: Path) -> None:
    file = tmp_path / "cache.safetensors"
    with attach(tiny(), decode=METHODS[name], cache=CONFIGS[config]) as session:
        cache, ids, mask = start(session)
        cache.save(file, tokens=ids[:, :-1])
        want, want_mask = go_on(session, cache, ids, mask, TURNS[0])
        want_last, _ = go_on(session, cache, want, want_mask, TURNS[1])
    with attach(tiny(), decode=METHODS[name], cache=CONFIGS[config]) as session:
        loaded = session.load_cache(file)
        assert loaded.kv.lengths == [n + NEW - 1 for n in LENGTHS] and torch.equal(loaded.column_mask(), mask[:, :-1])
        assert loaded.saved_tokens is not None and torch.equal(loaded.saved_tokens, ids[:, :-1])
        got, got_mask = go_on(session, loaded, ids, mask, TURNS[0])
        assert torch.equal(got, want)
        got_last, _ = go_on(session, loaded, got, got_mask, TURNS[1])
        assert torch.equal(got_last, want_last)
        second = session.load_cache(file).copy()
        second.select([1, 1])
        rows = torch.tensor([1, 1])
        narrow, _ = go_on(session, second, ids[rows], mask[rows], (TURNS[0][1],) * 2)
        assert torch.equal(narrow[0], want[1])


@pytest.mark.parametrize("name", ["mac", "quest", "magicpig"])
def test_answers_over_a_loaded_prompt_are_rolled_back(name: str, tmp_path: Path) -> None:
    """State that is made within a block that is rolled back is that of the prompt afterwards."""
    from longreach.adapters.transformers import Answer, Reader

    def asked(reader: Reader, seed: int) -> list[int]:
        return list(reader.ask(prompt(9, seed=seed)[0].tolist(), 8, (), Answer()))

    with attach(tiny(), decode=METHODS[name]) as session:
        reader = Reader(session)
        reader.read(prompt(70)[0].tolist())
        reader.cache.save(tmp_path / "cache")
        want = [asked(reader, seed) for seed in (1, 2, 1)]
    with attach(tiny(), decode=METHODS[name]) as session:
        reader = Reader(session)
        reader.cache = session.load_cache(tmp_path / "cache")
        assert [asked(reader, seed) for seed in (1, 2, 1)] == want


CHILD = """
import sys, torch
from longreach import attach, load
model, _ = load(sys.argv[1])
with attach(model, decode=sys.argv[3]) as session:
    cache = session.load_cache(sys.argv[2])
    ids = torch.cat([cache.saved_tokens, torch.arange(20, 31)[None]], 1)
    options = dict(past_key_values=cache, max_new_tokens=12, do_sample=False)
    print(model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0].tolist())
"""


@pytest.mark.parametrize("method", ["quest k=0.2 page=4", "mac window=24 band=8 tau=0.0 min_context=0"])
def test_a_fresh_process_goes_on(method: str, tmp_path: Path) -> None:
    folder, file = save_tiny(tmp_path / "model"), tmp_path / "cache"
    model, _ = load_model(folder)
    with attach(model, decode=method) as session:
        cache = session.new_cache()
        made = generate(session, prompt(60), max_new_tokens=9, eos_token_id=(), past_key_values=cache)
        cache.save(file, tokens=made.sequences[:, :-1])
        ids = torch.cat([made.sequences[:, :-1], torch.arange(20, 31)[None]], 1)
        ones = torch.ones_like(ids)
        want = model.generate(ids, attention_mask=ones, past_key_values=cache, max_new_tokens=12, do_sample=False)[
            0
        ].tolist()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = [sys.executable, "-c", CHILD, str(folder), str(file), method]
    out = subprocess.run(child, env=environment, capture_output=True, text=True, check=True).stdout
    assert json.loads(out) == want


def test_after_eviction(tmp_path: Path) -> None:
    ids = prompt(60)
    with attach(model_of("llama"), evict="snapkv capacity=24 window=8") as session, torch.no_grad():
        cache = session.new_cache()
        session.model(ids, past_key_values=cache)
        with pytest.raises(Unsupported, match="snapkv has yet to evict keys of the prompt"):
            cache.save(tmp_path / "cache")
        made = generate(session, torch.cat([ids, prompt(3)], 1), max_new_tokens=6, past_key_values=cache)
        assert cache.kv.evicted(0)
        cache.save(tmp_path / "cache")
        assert (tmp_path / "cache").stat().st_size < 2 * 2 * 2 * 16 * 4 * 60
        more = torch.cat([made.sequences, prompt(9, seed=3)], 1)
        want = generate(session, more, max_new_tokens=NEW, past_key_values=cache).sequences
    with attach(model_of("llama"), evict="snapkv capacity=24 window=8") as session:
        loaded = session.load_cache(tmp_path / "cache")
        assert torch.equal(generate(session, more, max_new_tokens=NEW, past_key_values=loaded).sequences, want)


def saved(path: Path, model: Any = None, **options: Any) -> Path:
    """A small saved cache."""
    with attach(model or model_of("llama"), **options) as session, torch.no_grad():
        cache = session.new_cache()
        session.model(prompt(), past_key_values=cache)
        cache.save(path)
    return path


def test_a_file_holds_the_slots_in_use_as_safetensors(tmp_path: Path) -> None:
    file = saved(tmp_path / "cache", cache=CacheConfig(capacity=1000))
    with safe_open(file, "pt") as content:
        assert sorted(content.keys()) == ["k/0", "k/1", "v/0", "v/1"]
        assert {tuple(content.get_tensor(name).shape) for name in content.keys()} == {(40, 2, 16)}  # noqa: SIM118
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def edited(**changes: Any) -> Any:
    model = tiny_model("llama", **{k: v for k, v in changes.items() if k != "weight"})
    if "weight" in changes:
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight[3, 5] += 0.25
    return model


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (lambda: tiny_model("qwen3"), {}, r"LlamaForCausalLM, 2 layers\), and this is .*Qwen3ForCausalLM, 2 layers"),
        (lambda: edited(num_hidden_layers=3), {}, r"2 layers\), and this is .*3 layers.*; load the model"),
        (lambda: edited(rms_norm_eps=1e-3), {}, "another configuration of the model"),
        (lambda: edited(weight=True), {}, "other weights of the model"),
        (
            lambda: tiny_model("llama").double(),
            {},
            r"another dtype of the model \(float32\), and this one has float64",
        ),
        (
            None,
            {"decode": "quest k=0.3 page=4"},
            r"decode=quest k=0.2, and this session has decode=quest k=0.3; attach",
        ),
        (None, {"decode": None}, r"decode=quest .*k=0.2 .*page=4.*has decode=dense;"),
        (None, {"prefill": "streaming_llm"}, r"prefill=dense, and this session has prefill=streaming_llm .*sinks"),
        (None, {"evict": "snapkv"}, r"evict=None, and this session has evict=snapkv"),
        (
            None,
            {"cache": CacheConfig("paged", page=8)},
            r"pages of 16 tokens, and .* has pages of 8 tokens; attach with",
        ),
        (None, {"cache": CacheConfig()}, r"pages of 16 tokens, and this cache has one page a sequence"),
    ],
)
def test_what_is_not_as_it_was_saved_is_refused(model: Any, options: Any, message: str, tmp_path: Path) -> None:
    paged = CacheConfig("paged", page=16)
    file = saved(tmp_path / "cache", decode="quest k=0.2 page=4", cache=paged)
    given = {"decode": "quest k=0.2 page=4", "cache": paged, **options}
    given_model = model_of("llama") if model is None else model()
    with attach(given_model, **given) as session, pytest.raises(InvalidInput, match=message) as caught:
        session.load_cache(file)
    assert "\n" not in str(caught.value) and str(file) in str(caught.value)


def test_another_plan_is_refused(tmp_path: Path) -> None:
    from tests.methods.planned import kascade_plan

    with attach(tiny()) as session:
        shape = session._shape
    with attach(tiny(), decode="kascade k=0.2") as session, torch.no_grad():
        cache = session.new_cache()
        session.model(prompt(), past_key_values=cache)
        cache.save(tmp_path / "cache")
    plan = kascade_plan(shape)
    plan = replace(plan, values={**plan.values, "k": 5})
    with (
        patch("longreach.adapters.transformers.saved_cache.plan_for", return_value=plan),
        attach(tiny(), decode="kascade k=0.2") as session,
        pytest.raises(InvalidInput, match="saved with another plan of decode=kascade"),
    ):
        session.load_cache(tmp_path / "cache")


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    """Every cut, and a changed byte anywhere, gives an error in one line; nothing is left in the session."""
    file = saved(tmp_path / "cache")
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    with attach(model_of("llama")) as session:

        def refused(changed: bytes, message: str) -> None:
            file.write_bytes(changed)
            with pytest.raises(InvalidInput, match=message) as caught:
                session.load_cache(file)
            assert "\n" not in str(caught.value) and "save the cache again" in str(caught.value)

        for end in (0, 1, 8, 100, start - 8):
            refused(content[:end], "is no saved cache")
        for end in (start, start + 1, len(content) - 1):
            refused(content[:end], f"is cut short: expected {len(content)} bytes, got {end}")
        refused(content + b"x", "is cut short: expected")
        for at in (start, start + 1000, len(content) - 1):
            refused(
                content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :], "the bytes of tensor '.*' have changed"
            )
        at = content.index(b"lengths")
        refused(content.replace(b'\\"columns\\": 40', b'\\"columns\\": 41'), "its header has changed")
        refused(content[:at] + b"x" + content[at + 1 :], "its header has changed")
        for noise in (b"\x80\x02}q", b"PK\x03\x04" * 99, os.urandom(999)):
            refused(noise, "is no saved cache")
        for at in range(0, start, 37):  # no other exception
            file.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
            with pytest.raises(InvalidInput):
                session.load_cache(file)
        file.write_bytes(content)
        assert session.load_cache(file).kv.lengths == [40] and session.static_caches == {}


def test_files_that_cannot_be_read_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = saved(tmp_path / "cache")
    before = file.read_bytes()
    with attach(model_of("llama")) as session, torch.no_grad():
        cache = session.new_cache()
        with pytest.raises(InvalidInput, match="the cache is empty; read a prompt"):
            cache.save(tmp_path / "other")
        session.model(prompt(seed=3), past_key_values=cache)
        for path, message in (
            (file, "exists already; choose another file, remove it, or give overwrite=True"),
            (tmp_path, "expected a file name, got a folder"),
            (tmp_path / "none" / "x", "No such file or directory; choose another file"),
            (file / "x", "Not a directory"),
        ):
            with pytest.raises(InvalidInput, match=message) as caught:
                cache.save(path)
            assert "\n" not in str(caught.value)
        for tokens in ([1, 2], torch.zeros(1, 41, dtype=torch.int64), torch.zeros(1, 40), "x"):
            with pytest.raises(InvalidInput, match=r"tokens: expected int64 \[1, 40\]"):
                cache.save(tmp_path / "other", tokens=tokens)
        with pytest.raises(InvalidInput, match="No such file or directory; check the path"):
            session.load_cache(tmp_path / "other")
        with pytest.raises(InvalidInput, match="cannot read"):
            session.load_cache(tmp_path)

        with monkeypatch.context() as patched:  # as for a user who is not root
            patched.setattr(os, "access", lambda path, mode: False)
            with pytest.raises(InvalidInput, match="its folder cannot be written; choose another file"):
                cache.save(tmp_path / "other")

        def full(fd: int) -> None:
            raise OSError(28, "No space left on device")

        def interrupted(fd: int) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(InvalidInput, match="No space left on device"):
                cache.save(file, overwrite=True)
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", interrupted)
            with pytest.raises(KeyboardInterrupt):
                cache.save(file, overwrite=True)
        assert file.read_bytes() == before and [path.name for path in tmp_path.iterdir()] == ["cache"]
        cache.save(file, overwrite=True)
        assert file.read_bytes() != before and session.load_cache(file).kv.lengths == [40]
        with pytest.raises(CapacityError, match="holds 20 tokens a sequence, 40 are needed"):
            session.load_cache(file, CacheConfig(capacity=20))
    with pytest.raises(InvalidInput, match="the session is closed"):
        session.load_cache(file)
    with pytest.raises(InvalidInput, match="the session is closed"):
        cache.save(tmp_path / "other")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    with pytest.raises(InvalidInput, match="its folder cannot be written"):
        saved(folder / "cache")


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "bf16"])
def test_families_and_dtypes(family: str, tmp_path: Path) -> None:
    model = tiny_model("llama").bfloat16() if family == "bf16" else tiny_model(family)
    with attach(model, decode="quest k=0.2 page=4") as session:
        cache, ids, mask = start(session)
        cache.save(tmp_path / "cache")
        want, _ = go_on(session, cache, ids, mask, TURNS[0])
        got, _ = go_on(session, session.load_cache(tmp_path / "cache"), ids, mask, TURNS[0])
    assert torch.equal(got, want)


def test_plans_of_the_first_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache is saved once the plan is made, and is loaded where that plan was found."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("longreach.methods.loki.automatic.LokiMaker.needed", 50)
    file, more = tmp_path / "cache", torch.cat([prompt(60), prompt(2, seed=3)], 1)
    with attach(model_of("llama"), decode="loki k=8") as session, torch.no_grad():
        cache = session.new_cache()
        session.model(prompt(40), past_key_values=cache)
        with pytest.raises(Unsupported, match="loki has no plan yet"):
            cache.save(file)
        session.model(prompt(60)[:, 40:], past_key_values=cache)
        cache.save(file)
        want = generate(session, more, max_new_tokens=NEW, past_key_values=cache).sequences
        assert session.report().fraction("decode") < 1
    with attach(model_of("llama"), decode="loki k=8") as session:
        got = generate(session, more, max_new_tokens=NEW, past_key_values=session.load_cache(file)).sequences
        assert torch.equal(got, want)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    message = r"another plan of decode=loki \(.*\), and this session's is none"
    with attach(model_of("llama"), decode="loki k=8") as session, pytest.raises(InvalidInput, match=message):
        session.load_cache(file)


def test_models_with_state_of_their_own_are_refused(tmp_path: Path) -> None:
    with attach(converted()) as session, torch.no_grad():
        cache = session.new_cache()
        session.model(prompt(), past_key_values=cache)
        for call in (lambda: cache.save(tmp_path / "cache"), lambda: session.load_cache(tmp_path / "cache")):
            with pytest.raises(Unsupported, match="its fastmka layers keep state of their own; read the prompt again"):
                call()
    assert not any(tmp_path.iterdir())
