"""a3_deep's calibration: how good each layer's choice of tokens is, by the distributions along the correct answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from longreach.adapters.transformers import CHUNK, FusedPrompt, LongreachCache, Reader, Session, attach
from longreach.adapters.transformers.prompt_tokens import uses_chunk_frequencies
from longreach.cache import CacheConfig
from longreach.errors import InvalidInput
from longreach.evals.calibration.base import Calibration, PlanContent, check_count
from longreach.evals.calibration.prompts import Prompt
from longreach.evals.compare import divergence
from longreach.evals.fusion.chunks import FusedPrompts
from longreach.evals.progress import Progress, unseen
from longreach.methods.call import ModelShape
from longreach.methods.fusion import PIE, A3Deep
from longreach.methods.fusion.base import best
from longreach.methods.fusion.plan import A3DeepPlan

if TYPE_CHECKING:
    from longreach.evals.calibration.run import CalibrationRun


def measure(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    layers: Sequence[int],
    ratio: float,
    *,
    chunk: int = CHUNK,
    progress: Progress = unseen,
    done: Mapping[str, Any] | None = None,
    keep: Callable[[str, Any], None] = lambda name, part: None,
) -> list[Any]:
    """{"kl", "hits"} of each prompt, a number for each of `layers`; see `A3DeepPlan`, which holds their means.

    Chunks are computed behind what stands before the first one of their prompt. kl: mean over the answer's tokens, in
    fp64. prompts: cut into chunks, with an answer. chunk: tokens per pass of exact reads. done, keep: as in `gather`.
    Raises InvalidInput where a ratio chooses no token of a prompt; else as `fusing.read`.
    """
    known = dict(done or {})
    waiting = [prompt for prompt in prompts if prompt.name not in known]
    room = CacheConfig(capacity=max((len(p.tokens) for p in waiting), default=1))
    with (
        attach(model, fuse=PIE(), cache=room) as session,
        progress("reading with each layer's choice", len(waiting) * len(layers)) as advance,
    ):
        fused = FusedPrompts(session, tokenizer, "system", chunk, graph=False)
        exact = Reader(session, chunk, graph=False)
        for one in waiting:
            ids, answer = one.tokens[: -one.answer], one.tokens[-one.answer :]
            prompt = fused.of(ids, one.chunks)
            oracle = _oracle(fused, prompt, ratio, one.name)
            exact.cache.empty()
            truth = _along(session, exact.cache, exact.read(ids), answer)
            part: dict[str, list[float]] = {"kl": [], "hits": []}
            for layer in layers:
                chosen = list[Tensor]()
                reader, logits, _ = fused.read(prompt, A3Deep(ratio=ratio, layer=layer), noted=chosen)
                assert reader.cache is not None
                mine = _along(session, reader.cache, logits[0], answer)
                part["kl"].append(float(divergence(truth, mine).mean()))
                part["hits"].append(float(torch.isin(oracle, chosen[-1]).double().mean()))
                advance(1)
            known[one.name] = part
            keep(one.name, part)
    return [known[prompt.name] for prompt in prompts]


def _oracle(fused: FusedPrompts, prompt: FusedPrompt, ratio: float, name: str) -> Tensor:
    """int64 [r]: as many tokens as a method chooses, those that an exact prefill changes most."""
    model = fused.session.model
    same = uses_chunk_frequencies(model, len(prompt.ids))
    chosen = best(fused.moved(prompt), prompt.parts(model.device, chunk_frequencies=same), ratio)
    if not len(chosen):
        raise InvalidInput(f"{name}: ratio {ratio} of {len(prompt.ids)} tokens is none; raise --ratio or --length")
    return chosen


@torch.no_grad()
def _along(session: Session, cache: LongreachCache, logits: Tensor, answer: Sequence[int]) -> Tensor:
    """fp64 [A, V]: log-probabilities of each of the answer's tokens. logits: [V] after the prompt that the cache holds;
    it then holds the answer's tokens but the last, too."""
    rows = logits[None]
    if len(answer) > 1:
        ids = torch.tensor([answer[:-1]], device=logits.device)
        more = session.model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0]
        rows = torch.cat([rows, more.float()])
    return rows.double().log_softmax(-1)


@dataclass(frozen=True)
class A3DeepCalibration(Calibration):
    """The layer in which a question's attention chooses the tokens to recompute.

    ratio: share of a prompt's tokens that is recomputed. layers: those to try, ascending; None: all. Each takes a fused
    read a prompt. chunk_tokens: of a document's chunk at most.
    """

    kind: ClassVar[str] = "a3_deep"
    tasks: ClassVar[str | None] = "vt,qa_synthetic_1,qa_synthetic_2"

    ratio: float = 0.15
    layers: tuple[int, ...] | None = None
    chunk_tokens: int = 512  # type: ignore[assignment]  # a field in place of the base's property

    def __post_init__(self) -> None:
        if not 0 < self.ratio < 1:
            raise InvalidInput(f"ratio: expected a number above 0 and below 1, got {self.ratio}; choose another")
        check_count("chunk_tokens", self.chunk_tokens)

    def check(self, shape: ModelShape) -> None:
        self._layers(shape)

    def _layers(self, shape: ModelShape) -> list[int]:
        if self.layers is None:
            return list(range(shape.layers))
        layers = sorted(set(self.layers))
        if not layers or not 0 <= layers[0] <= layers[-1] < shape.layers:
            raise InvalidInput(
                f"layers {','.join(map(str, self.layers))}: expected layers of the model, 0 to {shape.layers - 1}"
            )
        return layers

    def settings(self) -> dict[str, Any]:
        layers = "all" if self.layers is None else ",".join(map(str, self.layers))
        return {"ratio": self.ratio, "layers": layers, "chunk_tokens": self.chunk_tokens}

    def make(self, run: CalibrationRun) -> PlanContent:
        layers = self._layers(run.shape)
        parts = run.measure(partial(measure, run.model, run.tokenizer, run.prompts.prompts, layers, self.ratio))
        return PlanContent(A3DeepPlan.of_parts(parts, layers, self.ratio).values(), {})
