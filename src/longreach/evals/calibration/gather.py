"""A model reads prompts densely, one after another, and a calibration gathers data from each."""

from __future__ import annotations

import base64
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from longreach.adapters.transformers import CHUNK, Reader, attach, residuals
from longreach.cache import CacheConfig
from longreach.evals.calibration.prompts import Prompt
from longreach.evals.progress import Progress, unseen
from longreach.methods.base import Outcome
from longreach.methods.call import LayerCall, Phase
from longreach.methods.dense import Dense


class Gather(ABC):
    """The data that one kind of calibration gathers from prompts. For each: `begin`, its passes layer by layer,
    `finish`.

    needs_pre_rope: whether it uses `LayerCall.pre_rope`. needs_residuals: whether `residual` is to be called.
    """

    needs_pre_rope: ClassVar[bool] = False
    needs_residuals: ClassVar[bool] = False

    @abstractmethod
    def begin(self, prompt: Prompt) -> None:
        """The next passes read this prompt, from its beginning."""

    @abstractmethod
    def layer(self, call: LayerCall, outcome: Outcome) -> None:
        """A layer has attended for the rows of a pass: one sequence, rows in the order of their positions."""

    @abstractmethod
    def finish(self) -> Any:
        """The prompt's data as JSON (tensors by `packed`): a line of the journal."""

    def residual(self, layer: int, x: Tensor, out: Tensor) -> None:  # noqa: B027 - most need it not
        """Attention adds `out` [T, width] to the residual stream x [T, width]; after `layer` in each pass."""

    def chunk(self, tokens: int) -> int:
        """Tokens of a pass, given about how many are requested."""
        return tokens


class DenseBeforeRotation(Dense):
    """Exact attention in a session that also gives queries and keys before rotation."""

    needs_pre_rope: ClassVar[bool] = True


def gather(
    model: Any,
    prompts: Iterable[Prompt],
    what: Gather,
    *,
    chunk: int = CHUNK,
    progress: Progress = unseen,
    done: Mapping[str, Any] | None = None,
    keep: Callable[[str, Any], None] = lambda name, part: None,
) -> list[Any]:
    """The data of each prompt, in order.

    done: parts by the name of their prompt that an earlier run has made; keep(name, part) is called for each new one.
    """
    prompts, known = list(prompts), dict(done or {})
    waiting = [prompt for prompt in prompts if prompt.name not in known]
    method = DenseBeforeRotation() if what.needs_pre_rope else Dense()

    def observe(phase: Phase, call: LayerCall, outcome: Outcome) -> None:
        what.layer(call, outcome)

    def see(layer: int, x: Tensor, out: Tensor) -> None:
        what.residual(layer, x[0], out[0])

    room = CacheConfig(capacity=max((len(p.tokens) for p in waiting), default=1))
    with (
        attach(model, prefill=method, cache=room) as session,
        residuals(model, see) if what.needs_residuals else nullcontext(),
        progress("reading", sum(len(p.tokens) for p in waiting)) as advance,
        torch.inference_mode(),
    ):
        reader, session.on_layer = Reader(session, what.chunk(chunk), graph=False), observe
        for prompt in waiting:
            what.begin(prompt)
            with reader.rollback():
                reader.read(prompt.tokens, advance)
            known[prompt.name] = part = what.finish()
            keep(prompt.name, part)
    return [known[prompt.name] for prompt in prompts]


def packed(x: Tensor) -> dict[str, Any]:
    """A tensor of fp32, fp64, int32 or int64 as JSON holds it, to the bit."""
    array = x.detach().cpu().contiguous().numpy()
    text = base64.b64encode(zlib.compress(array.tobytes(), 1)).decode()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "zlib": text}


def unpacked(part: Mapping[str, Any]) -> Tensor:
    """The inverse of `packed`."""
    content = zlib.decompress(base64.b64decode(part["zlib"]))
    return torch.from_numpy(np.frombuffer(content, dtype=part["dtype"]).reshape(part["shape"]).copy())
