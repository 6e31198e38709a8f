"""Attach and take out again without a trace: after errors, Ctrl-C and out of memory; one caller at a time."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from longreach import CacheConfig, Dense, StreamingLLM, attach, detach
from longreach.adapters.transformers import Session
from longreach.cache import StatelessOnTruncate
from longreach.errors import ConcurrentUse, InvalidInput, OutOfMemory, Unsupported
from longreach.testing.tiny import tiny_model
from tests.adapters.transformers.reference import generate, model_of, padded_batch, prompt
from tests.tiers import families


def _trace(model: PreTrainedModel) -> dict[str, Any]:
    """All that attaching could leave behind: attributes, hooks and configurations of every module."""
    found: dict[str, Any] = {"config": copy.deepcopy(model.config.__dict__)}
    for name, module in model.named_modules():
        found[name] = {key: id(value) for key, value in vars(module).items()}
        found[f"{name} hooks"] = (len(module._forward_hooks), len(module._forward_pre_hooks))
        if isinstance(module, PreTrainedModel):
            found[f"{name} attention"] = module.config._attn_implementation
    return found


@pytest.mark.parametrize("family", families(4))
def test_afterwards_all_is_as_before(family: str) -> None:
    model, (tokens, mask) = model_of(family), padded_batch()
    trace, want = _trace(model), generate(model, tokens, mask, steps=6)
    with attach(model, prefill="streaming_llm", decode="oracle_top_k"):
        assert _trace(model) != trace
        other = generate(model, tokens, mask, steps=6)
    again = generate(model, tokens, mask, steps=6)
    assert torch.equal(again.logits, want.logits) and torch.equal(again.tokens, want.tokens)
    assert not torch.equal(other.logits, want.logits)
    assert _trace(model) == trace


def _registered() -> list[bool]:
    return ["longreach" in table.valid_keys() for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)]


def test_transformers_knows_the_name_only_while_some_session_lasts() -> None:
    model, other = model_of("llama"), tiny_model("qwen3")
    assert _registered() == [False, False]
    first, second = attach(model), attach(other)
    with pytest.raises(ConcurrentUse):
        attach(model)
    first.close()
    first.close()
    assert _registered() == [True, True]
    other(prompt())
    second.close()
    assert _registered() == [False, False]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_any_attention_is_restored(implementation: str) -> None:
    model = tiny_model("llama")
    model.set_attn_implementation(implementation)
    want = model(prompt()).logits
    with attach(model):
        model(prompt())
    assert model.config._attn_implementation == implementation
    assert torch.equal(model(prompt()).logits, want)


def test_attributes_of_the_instance_come_back() -> None:
    """Libraries that wrap forward or generate on the instance find their own again."""
    model = tiny_model("llama")
    decoder_forward, generated = model.model.forward, model.generate
    calls = []

    def mine(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return decoder_forward(*args, **kwargs)

    model.model.forward, model.generate = mine, generated
    with attach(model):
        model(prompt())
    assert calls == [1] and vars(model.model)["forward"] is mine and vars(model)["generate"] is generated


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_errors_in_the_block_restore_too(error: type[BaseException]) -> None:
    model = model_of("llama")
    trace = _trace(model)
    with pytest.raises(error), attach(model):
        raise error
    assert _trace(model) == trace


def test_an_error_while_attaching_leaves_the_model_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    trace = _trace(model)
    for step in ("_wrap_decoder", "_wrap_model", "_override"):
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="half-way"):
            patch.setattr(Session, step, _raise(RuntimeError("half-way")))
            attach(model)
        assert _trace(model) == trace and _registered() == [False, False]


def test_closing_twice_is_closing_once() -> None:
    model = model_of("llama")
    trace = _trace(model)
    session = attach(model)
    session.close()
    session.close()
    with attach(model):
        session.close()
        assert _trace(model) != trace
    assert _trace(model) == trace and session.report().layers == ()


def test_a_model_cannot_be_copied_or_pickled_while_attached() -> None:
    model = model_of("llama")
    with attach(model):
        with pytest.raises(Unsupported, match="copied"):
            copy.deepcopy(model)
        with pytest.raises(Unsupported, match="pickled"):
            pickle.dumps(model)


def test_a_model_saved_while_attached_is_the_plain_model(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with attach(model):
        model.save_pretrained(tmp_path)
    assert "longreach" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="eager")
    assert torch.equal(loaded(prompt()).logits, model(prompt()).logits)


# errors inside a pass


def _raise(error: BaseException) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


class _Fails:
    """A module whose forward fails at its n-th call, as if a user or the machine had stopped it."""

    def __init__(self, module: nn.Module, error: BaseException, at: int = 1):
        self.module, self.error, self.left = module, error, at
        self.handle = module.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error

    def __enter__(self) -> _Fails:
        return self

    def __exit__(self, *error: object) -> None:
        self.handle.remove()


FAILURES = {
    "gpu": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), OutOfMemory),
    "cpu": (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 8 bytes."), OutOfMemory),
    "python": (MemoryError(), OutOfMemory),
    "ctrl-c": (KeyboardInterrupt(), KeyboardInterrupt),
    "other": (RuntimeError("device-side assert"), RuntimeError),
}


@pytest.mark.covering
@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("where", ["layer 1", "lm_head"])
@pytest.mark.parametrize("call", ["generate", "chunked", "forward"])
def test_a_pass_that_fails_leaves_the_cache_as_it_was(name: str, where: str, call: str) -> None:
    """In the middle of the layers or after them, in the first chunk or the third: lengths, locks, next answer."""
    model = model_of("llama")
    error, raised = FAILURES[name]
    module = model.lm_head if where == "lm_head" else model.model.layers[1].mlp
    want = model.generate(prompt(30), max_new_tokens=6, do_sample=False)
    with attach(model, cache=CacheConfig("paged", page=4)) as session, torch.no_grad():
        cache = session.new_cache()
        held = 0 if call == "chunked" else 10
        if held:
            model(prompt(30)[:, :held], past_key_values=cache)
        with _Fails(module, error, at=3 if call == "chunked" else 1), pytest.raises(raised) as caught:
            if call == "forward":
                model(prompt(30)[:, held:], past_key_values=cache)
            else:
                chunk = 6 if call == "chunked" else None
                model.generate(prompt(30), past_key_values=cache, max_new_tokens=6, prefill_chunk_size=chunk)
        if raised is OutOfMemory:
            assert "Lower prefill_chunk_size" in str(caught.value) and "the batch" in str(caught.value)
        assert (cache.columns, cache.kv.lengths) == (held, [held])
        assert not session._busy.locked() and not session._generating.locked()
        got = model.generate(prompt(30), past_key_values=cache, max_new_tokens=6, do_sample=False)
    assert torch.equal(got, want)


def test_an_answer_that_no_memory_can_hold_is_refused_at_once_and_a_shorter_one_is_not() -> None:
    """Out of memory in earnest: the keys of 10^14 tokens, more than there are addresses for."""
    model = model_of("llama")
    want = model.generate(prompt(30), max_new_tokens=6, do_sample=False)
    with attach(model) as session:
        cache = session.new_cache()
        with pytest.raises(OutOfMemory, match="max_new_tokens"):
            model.generate(prompt(30), past_key_values=cache, max_new_tokens=10**14, do_sample=False)
        assert (cache.columns, cache.kv.lengths, cache.kv.nbytes) == (0, [0], 0)
        got = model.generate(prompt(30), past_key_values=cache, max_new_tokens=6, do_sample=False)
    assert torch.equal(got, want)


def test_what_methods_noted_of_a_failed_pass_is_taken_back() -> None:
    class Notes(StatelessOnTruncate):
        def __init__(self) -> None:
            self.seen, self.cut, self.firm = 0, None, False

        def check_truncate(self, slots: torch.Tensor, lengths: torch.Tensor) -> None:
            if self.firm:
                raise Unsupported("these notes cannot be shortened")

        def truncate(self, slots: torch.Tensor, lengths: torch.Tensor) -> None:
            self.cut = lengths.tolist()

        def reset(self, slots: torch.Tensor) -> None:
            self.seen = 0

    class Noting(Dense):
        def new_state(self, call: Any, slots: int) -> Any:
            return Notes()

        def run(self, call: Any, state: Any) -> Any:
            state.seen += call.rows.pos.shape[0]
            return super().run(call, state)

    model = model_of("llama")
    with attach(model, prefill=Noting()) as session, torch.no_grad():
        cache = session.new_cache()
        model(prompt(8), past_key_values=cache)
        first, second = cache.states.states()
        with _Fails(model.model.layers[0].mlp, ValueError()), pytest.raises(ValueError):
            model(prompt(5), past_key_values=cache)
        assert (first.seen, second.seen) == (13, 8) and first.cut == second.cut == [8]
        first.firm = True
        with _Fails(model.model.layers[0].mlp, ValueError()), pytest.raises(ValueError):
            model(prompt(5), past_key_values=cache)
        with pytest.raises(InvalidInput, match=r"could not be rolled back.*cannot be shortened.*new_cache"):
            model(prompt(5), past_key_values=cache)


# one caller at a time


def test_two_generate_calls_at_once_are_refused() -> None:
    model = model_of("llama")
    inside, go_on, answer = threading.Event(), threading.Event(), []

    class Waits:
        def put(self, tokens: Any) -> None:
            inside.set()
            assert go_on.wait(30)

        def end(self) -> None: ...

    def work() -> None:
        answer.append(model.generate(prompt(), max_new_tokens=6, do_sample=False, streamer=Waits()))

    want = model.generate(prompt(), max_new_tokens=6, do_sample=False)
    with attach(model):
        worker = threading.Thread(target=work)
        worker.start()
        assert inside.wait(30)
        with pytest.raises(ConcurrentUse, match="two answers at once on one attached model; finish or close"):
            model.generate(prompt(), max_new_tokens=6)
        with pytest.raises(ConcurrentUse, match="while another thread generates"):
            model(prompt())
        go_on.set()
        worker.join()
        assert torch.equal(answer[0], want)
        model.generate(prompt(), max_new_tokens=2)


def test_two_forward_passes_at_once_are_refused_and_the_first_goes_on() -> None:
    model = model_of("llama")
    inside, go_on, answer = threading.Event(), threading.Event(), []

    def wait(*args: Any) -> None:
        if threading.current_thread() is worker:
            inside.set()
            assert go_on.wait(30)

    want = model(prompt()).logits
    with attach(model):
        worker = threading.Thread(target=lambda: answer.append(model(prompt()).logits))
        hook = model.model.layers[1].register_forward_pre_hook(wait)
        worker.start()
        assert inside.wait(30)
        with pytest.raises(ConcurrentUse, match="two forward passes at once"):
            model(prompt())
        go_on.set()
        worker.join()
        hook.remove()
        assert torch.allclose(answer[0], want, rtol=0, atol=1e-4)
        model(prompt())


def test_a_pass_within_a_pass_is_refused_and_the_outer_one_goes_on() -> None:
    model, caught = model_of("llama"), []

    def observe(*args: Any) -> None:
        for call in (lambda: model(prompt(3)), session.close):
            with pytest.raises(ConcurrentUse) as error:
                call()
            caught.append(str(error.value))

    want = model(prompt()).logits
    with attach(model) as session:
        session.on_layer = observe
        got = model(prompt()).logits
    assert torch.allclose(got, want, rtol=0, atol=1e-4) and len(caught) == 4
    assert "two forward passes" in caught[0] and "closed from within" in caught[1]


def test_closing_waits_for_the_pass_of_another_thread() -> None:
    model, order = tiny_model("llama"), []
    inside, answer = threading.Event(), []

    def wait(*args: Any) -> None:
        inside.set()
        threading.Event().wait(0.2)
        order.append("pass")

    want = model(prompt()).logits
    with attach(model):
        hook = model.model.layers[1].register_forward_pre_hook(wait)
        worker = threading.Thread(target=lambda: answer.append(model(prompt()).logits))
        worker.start()
        assert inside.wait(30)
    order.append("closed")
    worker.join()
    hook.remove()
    assert order == ["pass", "closed"] and torch.allclose(answer[0], want, rtol=0, atol=1e-4)


def test_sessions_of_two_models_do_not_meet() -> None:
    """One model's pass runs within a callback of the other's."""
    model, other = model_of("llama"), tiny_model("qwen3", seed=4)
    want, other_want = model(prompt()).logits, other(prompt(7)).logits
    answers = []
    with attach(model) as session, attach(other, decode=StreamingLLM(1, 1)):
        session.on_layer = lambda *args: answers.append(other(prompt(7)).logits)
        got = model(prompt()).logits
    assert torch.allclose(got, want, rtol=0, atol=1e-4)
    assert len(answers) == 2 and all(torch.allclose(a, other_want, rtol=0, atol=1e-4) for a in answers)


def test_each_thread_may_use_its_own_model() -> None:
    models = [tiny_model("llama", seed=n) for n in range(2)]
    want = [m.generate(prompt(), max_new_tokens=12, do_sample=False) for m in models]
    got: dict[int, torch.Tensor] = {}

    def work(n: int) -> None:
        got[n] = models[n].generate(prompt(), max_new_tokens=12, do_sample=False)

    with attach(models[0]), attach(models[1]):
        workers = [threading.Thread(target=work, args=(n,)) for n in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert all(torch.equal(got[n], want[n]) for n in range(2))


def test_a_lost_session_is_closed_through_the_model() -> None:
    model = tiny_model("llama")
    before = _trace(model)
    attach(model)  # nothing keeps the session
    with pytest.raises(ConcurrentUse, match=r"attached already.*longreach\.detach\(model\)"):
        attach(model)
    detach(model)
    assert _trace(model) == before
    detach(model)  # nothing is attached
    with attach(model) as session:
        detach(model)
        with pytest.raises(InvalidInput, match="the session is closed"):
            session.check_open()
    with pytest.raises(InvalidInput, match="expected a transformers model"):
        detach(nn.Linear(2, 2))  # type: ignore[arg-type]
