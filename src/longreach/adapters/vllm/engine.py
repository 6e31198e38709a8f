"""The part of one worker that all attention layers share: method, state, ledger and the current step."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, cuda

from longreach.adapters.vllm import versions
from longreach.adapters.vllm.checks import bare_call, check_pages, shape_of
from longreach.adapters.vllm.memory import Needs, Reservation
from longreach.adapters.vllm.rotation import Rotation
from longreach.adapters.vllm.rows import decode_sizes
from longreach.adapters.vllm.settings import Settings
from longreach.adapters.vllm.step import Step
from longreach.errors import InvalidInput, Unsupported
from longreach.methods.base import AttentionMethod
from longreach.methods.call import ModelShape
from longreach.methods.dense import Dense
from longreach.ops import HeadShard
from longreach.runtime import Ledger, Pass, Report, Segment, StateStore
from longreach.runtime.forward import LayerHook
from longreach.runtime.ledger import HostCount


class Layer:
    """One attention layer of a model. module: vLLM's, which holds the cache. window: its sliding window, else None."""

    def __init__(self, number: int, module: Any, window: int | None):
        self.number, self.module, self.window = number, module, window


class Engine:
    """method: of decoding rows. shape: of the model, all ranks. shard: this rank's KV heads; None if it has all.

    on_layer: called with the result of each layer of decoding rows (tests; in steps that run in Python only).
    """

    def __init__(self, config: Any):
        settings = Settings.of(config)
        assert settings is not None
        self.version = versions.current()
        self.method: AttentionMethod = settings.decode
        self.shape: ModelShape = shape_of(config)
        self.method.check(self.shape)
        self.shard = _shard(self.shape)
        self.device = torch.device(config.device_config.device_type)
        self.max_requests: int = config.scheduler_config.max_num_seqs
        self.graphs = bool(config.compilation_config.cudagraph_mode.has_full_cudagraphs())
        self.sizes = decode_sizes(config)
        self.reservation = Reservation(Needs.of_engine(config, self.method, self.shape), config)
        self.layers: dict[int, Layer] = {}
        self.rotations: dict[int, Rotation] = {}
        self.batch_slots: Tensor | None = None
        self._pages = set[int]()
        self.ledger = Ledger()
        self.on_layer: LayerHook | None = None
        self._context = config.compilation_config.static_forward_context  # keeps the key of `engine_of` alive
        self._step: Step | None = None
        self._clear()

    def new_cache(self) -> None:
        """Forget all state: vLLM allocates a new cache. The one by which it profiles graphs is a small one."""
        self.reservation.release()
        self._clear()

    def _clear(self) -> None:
        self.store = StateStore(self.max_requests + 1, shared_pages=True, all_observed=True)  # one more for padding
        self._captured: dict[int, tuple[HostCount, ...]] = {}
        self._allocated = False

    # layers

    def find_layers(self) -> None:
        """Find the model's attention layers. Raises Unsupported where one uses another backend."""
        from vllm.model_executor.layers.attention import Attention
        from vllm.model_executor.models.utils import extract_layer_index

        found = dict[int, Layer]()
        for name, module in self._context.items():
            if not isinstance(module, Attention):
                continue
            if getattr(module.impl, "engine", None) is not self:
                raise Unsupported(
                    f"{name} uses the backend {module.attn_backend.get_name()}, and all layers must use longreach; "
                    f"leave the key 'longreach' out, or use another model"
                )
            number = extract_layer_index(name)
            if number in found:
                raise Unsupported(f"layer {number} has several attentions; longreach in vLLM needs one in each layer")
            found[number] = Layer(number, module, module.impl.window)
        if sorted(found) != list(range(self.shape.layers)):
            raise Unsupported(f"expected attention in layers 0 to {self.shape.layers - 1}, got {sorted(found)}")
        self.layers = found

    def check_pages(self, page: int, dtype: torch.dtype) -> None:
        """Raise Unsupported if the method's blocks of keys do not divide pages of `page` slots, or pages differ."""
        self._pages.add(page)
        if len(self._pages) > 1 and self.method.keeps == "tokens":
            raise Unsupported(
                f"{self.method.name} keeps state with the pages of keys, and vLLM has pages of {sorted(self._pages)} "
                f"slots for this model, which it may copy in part; use a method that keeps nothing"
            )
        numbers = [layer.number for layer in self._layers_without_window()]
        check_pages(self.method, self.shape, page, dtype, numbers, self.shard)

    def allocate(self) -> None:
        """Make the state of all layers, of the size of vLLM's cache. Once for each cache, before its first step."""
        if self._allocated:
            return
        for layer in self._layers_without_window():
            keys = keys_of(layer.module.kv_cache)
            self.store.get(self.method, bare_call(layer.number, keys, self.shape, self.shard))
        self._allocated = True

    def _layers_without_window(self) -> list[Layer]:
        """The layers whose attention the method computes."""
        return [layer for layer in self.layers.values() if layer.window is None]

    # requests, for a method that keeps state of sequences

    def find_rotations(self, model: Any) -> None:
        """Find how each layer rotates, if the method needs it. Raises Unsupported where that is not known."""
        from vllm.model_executor.models.utils import extract_layer_index

        if self.method.needs_pre_rope:
            names = [name for name, layer in self._context.items() if getattr(layer, "impl", None) is not None]
            self.rotations = {extract_layer_index(name): Rotation.of(model, name) for name in names}

    def begin_request(self, slot: int) -> None:
        """Another request has this slot from now on."""
        for state in self.store.states():
            state.reset(torch.tensor([slot], device=self.device))

    def slots_of(self, requests: int) -> Tensor | None:
        """int [requests], the slots of a batch's requests; None if the method keeps nothing of sequences.

        Raises InvalidInput where vLLM has not named them.
        """
        if self.method.keeps != "sequences":
            return None
        if self.batch_slots is None or len(self.batch_slots) < requests:
            raise InvalidInput(f"{self.method.name}: the model runner has not named the requests of this batch")
        return self.batch_slots[:requests]

    # steps

    def padded(self, requests: int) -> int:
        """To how many rows the decoding rows of a step are padded.

        Triton compiles several variants of a kernel, by the number of rows. Capture compiles those of captured sizes,
        so steps that read prompts too use the same sizes.
        """
        return next((size for size in self.sizes if size >= requests), requests)

    def step(self, builder: object, *, counted: bool, rows: int, padding: Tensor | None) -> Step:
        """The step that a builder makes metadata for: a new one if it has made its part of the last one.

        counted, rows: as in Step. padding: bool [R], decoding rows that are not counted; None if no row decodes.
        """
        if self._step is None or id(builder) in self._step.builders:
            self.settle()
            self.ledger.abandon()  # of a step that failed
            if padding is not None:
                self.ledger.mask_rows(padding)
            ledger = self.ledger if counted or rows else None
            observers = (self.method,) if self.method.observes_prompt else ()
            self._step = Step(
                Pass((Segment("decode", self.method),), self.shape, self.store, ledger, on_layer=self.on_layer),
                Pass((Segment("prefill", Dense(), observers),), self.shape, self.store, ledger),
                counted,
                rows,
            )
        self._step.builders.add(id(builder))
        return self._step

    def finish(self, step: Step) -> None:
        """The last layer has attended: count the step."""
        found = self.ledger.commit_on_device()
        if step.counted:
            self.ledger.commit_on_host(found)
        if step.rows and cuda.is_available() and cuda.is_current_stream_capturing():
            self._captured[step.rows] = found
        step.ran = True

    def settle(self) -> None:
        """Count the last step on the host, if a CUDA graph was replayed for it."""
        step = self._step
        if step is not None and step.counted and not step.ran:
            self.ledger.commit_on_host(self._captured.get(step.rows, ()))
            step.ran = True

    def forget_reads(self) -> None:
        """Count from zero."""
        self.settle()
        self.ledger.reset()

    def report(self) -> Report:
        """The reads of this rank so far. Waits for the device."""
        self.settle()
        return self.ledger.report(self.method)


def keys_of(cache: Tensor) -> Tensor:
    """K [P, G, page, D], a view of a layer's cache [P, G, page, 2 D]."""
    return cache[..., : cache.shape[3] // 2]


def values_of(cache: Tensor) -> Tensor:
    """V [P, G, page, D], a view of a layer's cache."""
    return cache[..., cache.shape[3] // 2 :]


_engines: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()


def engine_of(config: Any) -> Engine:
    """The engine of a VllmConfig in this worker, made at the first call. It lives as long as its layers."""
    key = id(config.compilation_config.static_forward_context)
    engine = _engines.get(key)
    if engine is None:
        engine = _engines[key] = Engine(config)
    return engine


def _shard(shape: ModelShape) -> HeadShard | None:
    """This rank's KV heads under tensor parallelism; None if it has all."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return None
    if shape.kv_heads % group.world_size:
        raise InvalidInput(f"expected a number of ranks that divides {shape.kv_heads} KV heads, got {group.world_size}")
    count = shape.kv_heads // group.world_size

    def total(x: Tensor) -> Tensor:
        found: Tensor = group.all_reduce(x.clone())
        return found

    return HeadShard(group.rank_in_group * count, count, shape.kv_heads, total)
