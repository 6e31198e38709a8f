"""Requests of model runner V2, for methods that keep state of sequences: their slots, and when a slot begins again.

V2 calls the model's own ModelState as requests come and go, and gives each request an index for as long as it runs. A
preempted request comes back as a new one: it reads its prompt and its answer again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from longreach.adapters.vllm.engine import Engine, engine_of
from longreach.adapters.vllm.settings import Settings
from longreach.adapters.vllm.wrapping import wrap_once


def install() -> None:
    """Give models of engines whose method keeps state of sequences a ModelState of ours. Once a process."""
    from vllm.v1.worker.gpu import model_runner

    wrap_once(model_runner, "init_model_state", _with_slots)


def _with_slots(plain: Callable[..., Any]) -> Callable[..., Any]:
    def init_model_state(vllm_config: Any, model: Any, *args: Any, **options: Any) -> Any:
        settings = Settings.of(vllm_config)
        if settings is not None and settings.decode.keeps == "sequences":
            kind = state_class(model)
            model.get_model_state_cls = lambda: kind  # vLLM uses the class that a model names
        return plain(vllm_config, model, *args, **options)

    return init_model_state


def state_class(model: Any) -> type[Any]:
    """A subclass of the ModelState that vLLM would use for a decoder."""
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    base = model.get_model_state_cls() if hasattr(model, "get_model_state_cls") else DefaultModelState
    if issubclass(base, RequestSlots):
        return base
    return type(f"Longreach{base.__name__}", (RequestSlots, base), {})


class RequestSlots:
    """Mixed in before a ModelState of vLLM's."""

    def __init__(self, vllm_config: Any, model: Any, *args: Any, **options: Any):
        super().__init__(vllm_config, model, *args, **options)  # type: ignore[call-arg]
        self.engine: Engine = engine_of(vllm_config)
        self.engine.find_rotations(model)

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """The slot begins again: what it held of another request is forgotten."""
        super().add_request(req_index, new_req_data)  # type: ignore[misc]
        self.engine.begin_request(req_index)

    def prepare_attn(self, input_batch: Any, *args: Any, **options: Any) -> Any:
        """Give the engine the requests of the batch, before metadata is built."""
        self.engine.batch_slots = _padded(input_batch)
        return super().prepare_attn(input_batch, *args, **options)  # type: ignore[misc]


def _padded(batch: Any) -> torch.Tensor:
    """int [n] on the device, n with the requests that pad the batch: these get the first slot, which is not used."""
    missing = batch.num_reqs_after_padding - batch.idx_mapping.shape[0]
    found: torch.Tensor = torch.nn.functional.pad(batch.idx_mapping, (0, max(0, missing)))
    return found
