"""Options of the trained attention: which variant, which levels, how keys are recalled."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from longreach.errors import InvalidInput, UnknownName
from longreach.ops.recall import check_bits
from longreach.ops.types import require

Variant = Literal["fastmka", "mka", "block_mka"]
Summary = Literal["ema", "mean"]
Routing = Literal["learned", "fixed", "top1", "top2"]
Mode = Literal["softmaxes", "gated"]
RecallBy = Literal["summary", "bounds", "hash", "index"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
LEVELS = (1, 2, 3)  # local, session, long-term
DEFAULT_TIERS: dict[str, tuple[int, ...]] = {"fastmka": (1, 2), "mka": LEVELS, "block_mka": LEVELS}
EDGE = 15.0  # logits of decays stay within -EDGE and EDGE
LEAST_DECAY = 1 / (1 + math.exp(EDGE))


@dataclass(frozen=True)
class MKAConfig:
    """The options of MKA's layers. JSON can hold them.

    variant: "fastmka" mixes keys and values of the levels before one attention (Algorithm 2); "mka" attends to each
        level (Algorithm 1, or Eq. 5); "block_mka" attends to a window, block summaries and recalled blocks (S5.3-5.4).
    tiers: the levels in use, ascending, 1 among them; (): (1, 2) for fastmka, all for the others.
    block: keys of a block. window: keys before a row that level 3 leaves out, a multiple of block: the row's own block
        and window / block before it. blocks: how many a row and KV head recall.
    recall: how blocks are scored: "bounds" (as Quest; heads of up to 128 channels), "summary" (attention weights of
        their mean keys), "hash" (signs of `bits` random projections), "index" (`features` trained numbers a key;
        `longreach mka index` trains them). fastmka recalls by "summary" or "hash", as its blocks hold keys before
        rotation. None: "bounds", for fastmka "summary".
    share: layers that recall; the layers after each one use its blocks. (): every layer recalls for itself.
    summary: session level of fastmka and mka: "ema" (a trained decay for each KV head) or "mean" of all tokens.
    decay: first decay of all heads, from LEAST_DECAY to 1 - LEAST_DECAY. None: half-lives from 1 to 1024 tokens, spread
        over the heads.
    routing: "learned", "fixed" (levels weigh the same), "top1", "top2" (the others weigh 0; for three levels).
    mode: of mka: "softmaxes" adds the levels' outputs (Algorithm 1), "gated" is one softmax (Eq. 5-14).
    router_width: hidden width of the router. seed: of random projections.
    layers: converted layers, ascending; None: all.

    Raises InvalidInput for options without effect, unless they have their default value.
    """

    variant: Variant
    tiers: tuple[int, ...] = ()
    block: int = 64
    window: int = 512
    blocks: int = 8
    recall: RecallBy = None  # type: ignore[assignment]  # never None after __post_init__
    bits: int = 128
    features: int = 32
    share: tuple[int, ...] = ()
    summary: Summary = "ema"
    decay: float | None = None
    routing: Routing = "learned"
    mode: Mode = "softmaxes"
    router_width: int = 64
    seed: int = 0
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise UnknownName("MKA variant", str(self.variant), VARIANTS)
        if self.tiers == ():
            object.__setattr__(self, "tiers", DEFAULT_TIERS[self.variant])
        whole = isinstance(self.tiers, tuple) and all(type(tier) is int for tier in self.tiers)
        ok = whole and set(self.tiers) <= set(LEVELS) and list(self.tiers) == sorted(set(self.tiers))
        ok = ok and 1 in self.tiers
        require(ok, f"tiers: expected a list of {LEVELS}, ascending, 1 among them, such as [1, 3], got {self.tiers!r}")
        if self.recall is None:
            object.__setattr__(self, "recall", self._default("recall"))
        for name, kind in (("recall", RecallBy), ("summary", Summary), ("routing", Routing), ("mode", Mode)):
            if getattr(self, name) not in get_args(kind):
                raise UnknownName(f"{name} of {self.variant}", str(getattr(self, name)), get_args(kind))
        for name in ("block", "window", "blocks", "router_width"):
            require(is_count(getattr(self, name)), f"{name}: expected a count >= 1, got {getattr(self, name)!r}")
        require(self.window % self.block == 0, f"window: expected a multiple of block={self.block}, got {self.window}")
        check_bits(self.bits)
        check_bits(self.features, "features")
        ok = isinstance(self.decay, float) and LEAST_DECAY <= self.decay <= 1 - LEAST_DECAY
        between = f"from {LEAST_DECAY:.2g} to 1 - {LEAST_DECAY:.2g}"
        require(ok or self.decay is None, f"decay: expected a float {between}, or None, got {self.decay!r}")
        ok = isinstance(self.seed, int) and not isinstance(self.seed, bool) and 0 <= self.seed < 2**32
        require(ok, f"seed: expected an int in [0, 2^32), got {self.seed!r}")
        check_ascending("share", self.share)
        if self.layers is not None:
            check_ascending("layers", self.layers)
            require(len(self.layers) > 0, "layers: expected at least one layer, or None for all")
            outside = [n for n in self.share if n not in self.layers]
            require(not outside, f"share: layers {outside} are not among the converted layers {list(self.layers)}")
        if self.variant == "fastmka" and 3 in self.tiers and self.recall not in ("summary", "hash"):
            raise InvalidInput(
                f"recall: fastmka recalls blocks of keys before rotation, by 'summary' or 'hash', got {self.recall!r}"
            )
        ok = self.routing != "top2" or len(self.tiers) != 2
        require(ok, f"routing: top2 keeps two levels, and tiers {self.tiers} are two; use 'learned', which is the same")
        self._refuse_unused(f.name for f in fields(self) if getattr(self, f.name) != self._default(f.name))

    def _default(self, option: str) -> Any:
        """An option's default with this variant and these tiers."""
        if option == "recall":
            return "bounds" if 3 in self.tiers and self.variant != "fastmka" else "summary"
        return {f.name: f.default for f in fields(self)}[option]

    def _refuse_unused(self, given: Iterable[str]) -> None:
        unused = sorted(set(given) & self.unused())
        require(
            not unused, f"{', '.join(unused)}: without effect in {self.variant} with tiers {self.tiers}; leave it out"
        )

    @classmethod
    def make(cls, variant: str, **options: Any) -> MKAConfig:
        """The config with these options. Raises UnknownName for an option that does not exist, and InvalidInput for
        one that this variant does not use."""
        known = [f.name for f in fields(cls) if f.name != "variant"]
        for name in options:
            if name not in known:
                raise UnknownName(f"option of {variant}", name, known)
        lists = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
        made = cls(variant, **lists)  # type: ignore[arg-type]
        made._refuse_unused(options)
        return made

    def unused(self) -> set[str]:
        """Options that change nothing with this variant and these tiers."""
        none = set[str]()
        if self.variant != "mka" or self.tiers == (1,):
            none.add("mode")
        if self.variant == "block_mka" or 2 not in self.tiers:
            none |= {"summary", "decay"}
        elif self.summary == "mean":
            none.add("decay")
        if 3 not in self.tiers:
            none |= {"blocks", "recall", "bits", "features", "share"}
            none |= set[str]() if self.variant == "block_mka" else {"block", "window"}
        if self.recall != "hash":
            none |= {"bits", "seed"}
        if self.recall != "index":
            none.add("features")
        if self.tiers == (1,):
            none |= {"routing", "router_width"}
        if self.routing == "fixed":
            none.add("router_width")
        return none

    @property
    def start(self) -> tuple[float, ...]:
        """Weights of the levels in use at gate 0: the layer that was converted."""
        weights = {1: 1.0, 2: 0.0, 3: 1.0 if self.variant == "block_mka" else 0.0}
        return tuple(weights[tier] for tier in self.tiers)

    @property
    def keeps_means(self) -> bool:
        """Whether layers keep running means from pass to pass: the session level of fastmka and mka."""
        return 2 in self.tiers and self.variant != "block_mka"

    @property
    def keeps_sums(self) -> bool:
        """Whether layers keep sums of blocks, which fastmka recalls; the others compute blocks from cached keys."""
        return 3 in self.tiers and self.variant == "fastmka"

    @property
    def turns_blocks(self) -> bool:
        """Whether layers compute blocks from rotated keys, for which they need the rotation's frequencies."""
        return (self.variant == "block_mka" and self.tiers != (1,)) or (self.variant == "mka" and 3 in self.tiers)

    @property
    def unrotates(self) -> bool:
        """Whether recall takes the rotation off keys and queries, and so needs the positions of their rotation."""
        return self.turns_blocks and 3 in self.tiers and self.recall in ("hash", "index")

    @property
    def caches_level_2(self) -> bool:
        """Whether layers put level-2 keys and values into the cache, as further KV heads."""
        return self.keeps_means and self.variant == "mka"

    def converts(self, layer: int) -> bool:
        """Whether a layer of the model is one of these layers."""
        return self.layers is None or layer in self.layers

    def recalls(self, layer: int) -> bool:
        """Whether a converted layer with level 3 chooses its own blocks."""
        return not self.share or layer in self.share

    def check_model(self, layers: int, head_dim: int) -> None:
        """Raise InvalidInput where options do not fit a model. layers: its number of layers. head_dim: of its heads."""
        for name in ("layers", "share"):
            for number in getattr(self, name) or ():
                require(
                    number < layers, f"{name}: layer {number} does not exist, the model has layers 0 to {layers - 1}"
                )
        self.check_head_dim(head_dim)
        if self.share:
            first = 0 if self.layers is None else self.layers[0]
            require(first in self.share, f"share: the first converted layer, {first}, must be in it, got {self.share}")

    def check_head_dim(self, head_dim: int) -> None:
        """Raise InvalidInput where blocks cannot be recalled by keys of `head_dim` channels."""
        if 3 in self.tiers and self.recall == "bounds":
            require(
                head_dim <= 128,
                f"recall='bounds' takes heads of up to 128 channels, got {head_dim}; use recall='summary'",
            )

    def to_json(self) -> dict[str, Any]:
        """Options as JSON holds them; `from_json` reads them back."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, options: Mapping[str, Any]) -> MKAConfig:
        """The config that `to_json` described. Raises InvalidInput and UnknownName."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise UnknownName("option of MKA", name, known)
        require("variant" in options, f"MKA options: expected a variant, got {sorted(options)}")
        given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in options.items()}
        return cls(**given)


def is_count(value: object) -> bool:
    """Whether `value` is an int (True is none) of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_ascending(name: str, layers: object) -> None:
    """Raise InvalidInput unless `layers` is a tuple of ascending layer numbers."""
    ok = isinstance(layers, tuple) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in layers)
    ok = ok and list(layers) == sorted(set(layers))  # type: ignore[call-overload]
    require(ok, f"{name}: expected layer numbers, ascending, such as [0, 2], got {layers!r}")
