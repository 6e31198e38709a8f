"""The fingerprint changes with all that changes a key, and with nothing else."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from longreach import attach
from longreach.adapters.transformers import Fingerprint, fingerprint, load, sharded_weights
from longreach.adapters.transformers.fingerprint import SAMPLE
from longreach.errors import Unsupported
from longreach.testing.ranks import run_on_ranks
from longreach.testing.tiny import FAMILIES, save_tiny, tiny_model


def of(model: Any) -> str:
    return fingerprint(model).digest


def test_equal_models_have_equal_fingerprints(tmp_path: Path) -> None:
    """Drawn twice, copied, written and loaded, called, attached."""
    model = tiny_model("llama")
    want = of(model)
    assert len(want) == 64 and of(tiny_model("llama")) == want == of(copy.deepcopy(model))
    save_tiny(tmp_path / "one")
    loaded, _ = load(tmp_path / "one")
    again, _ = load(tmp_path / "one")
    assert of(loaded) == of(again) == want
    model(torch.tensor([[1, 2, 3]]))
    with attach(model):
        assert of(model) == want
    assert of(model) == want


def test_every_family_has_its_own() -> None:
    assert len({of(tiny_model(family)) for family in FAMILIES}) == len(FAMILIES)


def _one_bit(model: Any) -> Any:
    weight = model.model.layers[1].mlp.down_proj.weight
    with torch.no_grad():
        weight.view(torch.int32)[3, 5] ^= 1
    return model


def _swapped(model: Any) -> Any:
    first, second = model.model.layers[0].mlp, model.model.layers[1].mlp
    model.model.layers[0].mlp, model.model.layers[1].mlp = second, first
    return model


def _config(**fields: Any) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        for name, value in fields.items():
            setattr(model.config, name, value)
        return model

    return change


@pytest.mark.parametrize("family", FAMILIES)
def test_frequencies_rounded_by_a_cast_change_it(family: str, tmp_path: Path) -> None:
    """Loaded in bf16, or loaded and cast: equal weights, other rotations, so other keys from the second layer on."""
    tiny_model(family).save_pretrained(tmp_path)
    loaded, cast = (type(tiny_model(family)).from_pretrained(tmp_path, dtype=d) for d in ("bfloat16", "float32"))
    want = of(loaded)
    loaded(torch.arange(40)[None])
    assert of(loaded) == want != of(cast.bfloat16())


def _quantised(model: Any) -> Any:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning")
@pytest.mark.parametrize(
    "change",
    [
        _one_bit,
        _swapped,
        _quantised,
        lambda model: model.bfloat16(),
        lambda model: model.bfloat16().float(),
        _config(rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
        _config(rms_norm_eps=1e-3),
        _config(sliding_window=8),
        _config(quantization_config={"quant_method": "fp8"}),
    ],
    ids=["bit", "swapped", "int8", "bf16", "rounded", "rope", "norm", "window", "quantisation"],
)
def test_what_changes_keys_changes_it(change: Callable[[Any], Any]) -> None:
    model = tiny_model("llama")
    want = of(model)
    assert of(change(model)) != want


def _number(path: str, value: Any) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        module, _, name = path.rpartition(".")
        setattr(model.get_submodule(module), name, value)
        return model

    return change


@pytest.mark.parametrize(
    "change",
    [
        _config(sliding_window=4),
        _number("model.layers.0.self_attn.scaling", 0.5),
        _number("model.layers.1.input_layernorm.variance_epsilon", 0.1),
        _number("model.layers.1.self_attn.sliding_window", 4),
        _number("model.layers.1.self_attn.is_causal", False),
    ],
    ids=["window", "scaling", "epsilon", "a layer's window", "causal"],
)
def test_settings_changed_where_modules_keep_them(change: Callable[[Any], Any]) -> None:
    model = tiny_model("mistral")
    taken = fingerprint(model)
    assert taken.holds(model)
    change(model)
    assert not taken.holds(model) and of(model) != taken.digest


@pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning")
def test_quantised_weights_are_read() -> None:
    """Not only that there are some: one of them changed changes it."""
    want = of(_quantised(tiny_model("llama")))
    assert of(_quantised(tiny_model("llama"))) == want
    moved = tiny_model("llama")
    with torch.no_grad():
        moved.model.layers[0].self_attn.k_proj.weight[0] *= 1.5
    assert of(_quantised(moved)) != want


def test_what_changes_no_key_does_not_change_it() -> None:
    model = tiny_model("llama")
    want = of(model)
    model.config.name_or_path, model.config.use_cache, model.config.eos_token_id = "elsewhere", False, 7
    model.config._attn_implementation = "sdpa"
    model.model.name_or_path, model.model.gradient_checkpointing = "elsewhere", True
    model.model.rotary_emb.max_seq_len_cached = 9000
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert of(model) == want


def test_writing_to_a_weight_is_noticed_without_reading() -> None:
    model = tiny_model("gemma2")
    taken = fingerprint(model)
    assert taken.holds(model)
    model(torch.tensor([[1, 2, 3]]))
    assert taken.holds(model)
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.mul_(2)
    assert not taken.holds(model)
    other = tiny_model("gemma2")
    assert not taken.holds(other)
    other = tiny_model("gemma2")
    taken = fingerprint(other)
    other.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.zeros(96, 64))
    assert not taken.holds(other) and isinstance(taken, Fingerprint)


@pytest.mark.parametrize("change", [lambda model: model.bfloat16(), lambda model: model.bfloat16().float()])
def test_a_cast_is_noticed_without_reading(change: Callable[[Any], Any]) -> None:
    """Casts leave the parameters' objects and counts as they are."""
    model = tiny_model("llama")
    taken = fingerprint(model)
    change(model)
    assert not taken.holds(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_sample_of_every_weight_tells_what_counts_do_not(family: str, dtype: torch.dtype) -> None:
    """Writes through .data and numpy; of every parameter, also where only the last bits change."""
    model = tiny_model(family).to(dtype)
    taken = fingerprint(model)
    assert taken.sampled_alike(model) and fingerprint(model) == taken
    for name, weight in model.model.named_parameters():
        kept = weight.data.clone()
        bits = weight.data.view(torch.uint8).numpy()
        bits ^= 1
        assert taken.holds(model) and not taken.sampled_alike(model), name
        weight.data.copy_(kept)
        assert taken.sampled_alike(model)


def test_a_sample_is_a_few_bytes_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is cheap, and one element changed behind torch's back may stay unseen, as documented."""
    model, read = tiny_model("llama"), []
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda pieces: read.extend(map(len, pieces)) or cat(pieces))
    fingerprint(model).sampled_alike(model)
    assert len(read) == 2 * len(list(model.model.parameters())) and max(read) <= SAMPLE + 1


def test_an_adapter_is_refused_by_name() -> None:
    model = tiny_model("llama")

    class Lora(nn.Module):
        pass

    Lora.__module__ = "peft.tuners.lora.layer"
    model.model.layers[0].self_attn.adapter = Lora()
    with pytest.raises(Unsupported, match=r"adapter that is not merged.*merge_and_unload"):
        fingerprint(model)


def test_a_tensor_of_several_is_read_whole_and_a_strange_one_refused() -> None:
    model = tiny_model("llama")

    class Scaled(torch.Tensor):
        @staticmethod
        def __new__(cls: Any, data: Any, scale: Any) -> Any:
            made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)
            made.data_, made.scale_ = data, scale
            return made

        def __tensor_flatten__(self) -> Any:
            return ["data_", "scale_"], None

        @classmethod
        def __torch_dispatch__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0]

    data = torch.ones(4, dtype=torch.int8)
    found = []
    for scale in (1.0, 2.0):
        value = Scaled(data, torch.tensor([scale]))
        state = {**tiny_model("llama").model.state_dict(), "odd": value}
        model.model.state_dict = types.MethodType(lambda self, state=state: state, model.model)
        found.append(of(model))
    assert found[0] != found[1]
    model.model.state_dict = types.MethodType(lambda self: {"odd": object()}, model.model)
    with pytest.raises(Unsupported, match="LlamaModel's odd is a object"):
        of(model)


def test_weights_that_are_not_there_are_refused() -> None:
    with torch.device("meta"):
        model = copy.deepcopy(tiny_model("llama")).to("meta")
    with pytest.raises(Unsupported, match="meta device"):
        of(model)


# sharded weights


def sharded(rank: int, world: int) -> dict[str, Any]:
    """Gathered bytes of tensors that are placed in all ways, in pieces of a few rows; and what is refused."""
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh, found = init_device_mesh("cpu", (world,)), dict[str, Any]()
    sharded_weights.PIECE = 100
    for placement in (
        Shard(0),
        Shard(1),
        Shard(-1),
        _StridedShard(0, split_factor=2),
        _StridedShard(1, split_factor=2),
    ):
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            whole = (
                (torch.arange(7 * 8 if placement == Shard(0) else 8 * 12) * 2.625).to(dtype).view(-1, 8, 1).squeeze(-1)
            )
            whole[0, 0] = -0.0 if dtype.is_floating_point else 255
            placed = distribute_tensor(whole.clone(), mesh, [placement])
            pieces = list(sharded_weights.gathered(placed, "it"))
            want = whole.reshape(-1).view(torch.uint8)
            assert len(pieces) > 1 or whole.nbytes <= 100
            found[f"{placement} {dtype}"] = torch.equal(torch.cat(pieces), want)
    bias = torch.arange(9.0)
    pieces = list(sharded_weights.gathered(distribute_tensor(bias.clone(), mesh, [Shard(0)]), "it"))
    found["uneven, of one dimension"] = torch.equal(torch.cat(pieces), bias.view(torch.uint8))
    found["replicated"] = sharded_weights.is_sharded(distribute_tensor(bias, mesh, [Replicate()]))
    twice = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    for name, on, placements in (
        ("two", twice, [Shard(0), Shard(0)]), ("partial", mesh, [Partial()]), ("tp", twice, [Replicate(), Shard(0)])
    ):  # fmt: skip
        placed = torch.distributed.tensor.DTensor.from_local(torch.ones(4, 2), on, placements, run_check=False)
        try:
            found[name] = len(torch.cat(list(sharded_weights.gathered(placed, "the weight"))))
        except Unsupported as error:
            found[name] = str(error)
    return found


def test_sharded_weights_are_gathered_to_the_bytes_of_the_whole() -> None:
    for found in run_on_ranks("tests.adapters.transformers.test_fingerprint:sharded"):
        refused = {name: found.pop(name) for name in ("two", "partial")}
        assert all("the weight is a DTensor" in why for why in refused.values())
        assert found.pop("replicated") is False and found.pop("tp") == 4 * 2 * 2 * 4
        assert found and all(found.values()), found
