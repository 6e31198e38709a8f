"""Memory of a method in addition to vLLM's cache, held while vLLM measures the memory that is left for its cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longreach.errors import OutOfMemory
from longreach.methods.base import AttentionMethod
from longreach.methods.call import ModelShape

logger = logging.getLogger("vllm.longreach")  # a child of vLLM's, so that it is shown as vLLM's are


@dataclass(frozen=True)
class Needs:
    """Bytes on one rank. page: state of each page of keys. sequences: state that does not grow with pages.

    workspace: the most that one layer's decode call holds while it runs, with as many requests as vLLM runs at once.
    captured: the same in the largest captured step, whose memory is its own; 0 without captured steps.
    keys: keys and values of a page.
    """

    page: int
    sequences: int
    workspace: int
    captured: int
    keys: int

    @classmethod
    def of(
        cls, method: AttentionMethod, model: ModelShape, *, ranks: int, requests: int, captured: int, page: int,
        capacity: int, dtype: torch.dtype,
    ) -> Needs:  # fmt: skip
        """captured: requests of the largest captured step. capacity: slots that a request can address."""
        one, two = (method.state_bytes(model, n, page, dtype) for n in (1, 2))
        if method.keeps == "sequences":
            growing, constant = 0, method.state_bytes(model, requests, 1, dtype)
        else:
            growing, constant = two - one, 2 * one - two
        return cls(
            growing // ranks,
            constant // ranks,
            method.workspace_bytes(model, requests, capacity, dtype) // ranks,
            method.workspace_bytes(model, captured, capacity, dtype) // ranks,
            2 * model.layers * model.kv_heads * model.head_dim * page * dtype.itemsize // ranks,
        )

    @classmethod
    def of_engine(cls, config: Any, method: AttentionMethod, model: ModelShape) -> Needs:
        """config: a VllmConfig."""
        ranks = config.parallel_config.tensor_parallel_size
        requests, compilation = config.scheduler_config.max_num_seqs, config.compilation_config
        # vLLM measures the graphs of model runner V1 itself
        graphs = compilation.cudagraph_mode.has_full_cudagraphs() and config.use_v2_model_runner
        captured = min(requests, compilation.max_cudagraph_capture_size or 0) if graphs else 0
        return cls.of(
            method, model, ranks=ranks, requests=requests + 1, captured=captured, page=config.cache_config.block_size,
            capacity=config.model_config.max_model_len, dtype=config.model_config.dtype,
        )  # fmt: skip

    def held(self, available: int) -> int:
        """Bytes to hold of those that are left for the cache and all else."""
        fixed = self.sequences + self.captured
        return fixed + max(0, available - fixed) * self.page // (self.page + self.keys)


class Reservation:
    """Holds a method's memory from vLLM's profiling until it makes the cache."""

    def __init__(self, needs: Needs, config: Any):
        self.needs = needs
        cache_size_given_by_user = config.cache_config.kv_cache_memory_bytes is not None
        self._may_take = not cache_size_given_by_user  # else vLLM measures nothing
        self._share = config.cache_config.gpu_memory_utilization
        self._held: Tensor | None = None

    def take(self, device: torch.device) -> None:
        """Take the memory, once; and the workspace of a step, for a moment, so that vLLM counts it among its peaks.

        Nothing is taken after `release`. Raises OutOfMemory if it is not there.
        """
        if device.type != "cuda" or self._held is not None or not self._may_take:
            return
        free, total = torch.cuda.mem_get_info(device)
        hold = self.needs.held(max(0, int(total * self._share) - (total - free)))
        logger.info(
            "longreach: %.2f GiB for state, and %.2f GiB while a layer attends for all requests at once: lower "
            "max_num_seqs or max_model_len to lower the second",
            hold / 2**30,
            self.needs.workspace / 2**30,
        )
        try:
            self._held = torch.empty(hold, dtype=torch.uint8, device=device)
            torch.empty(self.needs.workspace, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"the decode method takes {hold / 2**30:.1f} GiB of state and {self.needs.workspace / 2**30:.1f} GiB "
                f"while it runs: lower max_num_seqs or max_model_len, or use a method that keeps less"
            ) from error

    def release(self) -> None:
        """vLLM has measured, and makes its cache: the method's state takes its own memory.

        Passes without metadata follow, by which vLLM captures graphs.
        """
        self._held, self._may_take = None, False
