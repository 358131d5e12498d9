"""The promise: frozen weights of bitsandbytes in 4 or 8 bits are cut, gathered and kept as they are packed.

The short cases are of a stand-in for bitsandbytes (tests/packed.py), the long ones of the library itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import config
from packed import WIDTH, Block, Net
from ranks import Pool
from torch import nn

import zero
from zero.core.quantized import beside

installed = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed: pip install bitsandbytes"
)
TREE = {"zero": {"reduce": "tree"}}


def kinds(*forms: str) -> list[Any]:
    """(format, whether by bitsandbytes itself): the two kinds of the stand-in, and long ones."""
    real = [pytest.param(form, True, marks=[installed, pytest.mark.long]) for form in forms]
    return [("nf4-nested", False), ("int8", False), *longer(("nf4", False)), *real]


every_kind = pytest.mark.parametrize(("form", "real"), kinds("nf4-nested", "fp4", "int8"))


def batches(world: int, first: int = 0, last: int = 3) -> Iterator[torch.Tensor]:
    """This rank's micro-batches: two in a step, over all ranks."""
    for step in range(first, last):
        both = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).chunk(2)
        yield from both if world == 1 else both[dist.get_rank() :][:1]


def engine_of(model: nn.Module, stage: int, **more: Any) -> Any:
    world = dist.get_world_size()
    settings = config(stage, world, micro=2, accumulation=2 // world, **{**TREE, **more})
    return zero.initialize(model=model, config=settings)[0]


def train(engine: Any, first: int = 0, last: int = 3) -> list[float]:
    losses = []
    for batch in batches(engine.world_size, first, last):
        loss = engine(batch.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def whole(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.module_state_dict().items()}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


# --- the same numbers ---------------------------------------------------------------------------------------


def trained(form: str, real: bool, stage: int, init: bool = False, **more: Any) -> tuple[list[float], Any]:
    with zero.Init() if init else contextlib.nullcontext():
        model = Net(form, real)
    engine = engine_of(model if init else model.to("cpu"), stage, **more)  # which quantises
    losses, weights = train(engine), whole(engine)
    engine.destroy()
    return losses, weights


def plainly(form: str, real: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same without zero."""
    model = Net(form, real).to("cpu")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2, weight_decay=0.1)
    losses = []
    for batch in batches(1):
        loss = model(batch)
        (loss / 2).backward()
        losses.append(loss.item())
        if len(losses) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses, dict(model.state_dict())


@every_kind
def test_two_ranks_train_as_one_does(pool: Pool, form: str, real: bool) -> None:
    ((losses, weights),) = pool.run(1, trained, form, real, 0)
    plain_losses, plain = plainly(form, real)
    assert losses[:2] == plain_losses[:2]
    assert losses == pytest.approx(plain_losses, rel=1e-5)
    frozen = [name for name in plain if not (".first." in name or ".second." in name)]
    assert len(frozen) >= 9
    assert all(torch.equal(weights[name], plain[name]) for name in frozen)
    for stage, init in ((1, False), (3, False), (3, True)):
        found = pool.run(2, trained, form, real, stage, init)
        assert [each for pair in zip(*(losses for losses, _ in found), strict=True) for each in pair] == losses
        assert all(same(weights, seen) for _, seen in found), (stage, init)


@pytest.mark.parametrize(("form", "real"), [("nf4-nested", False), *longer(("int8", False)), *kinds("nf4-nested")[3:]])
@pytest.mark.parametrize(
    "more",
    [
        {"bf16": {"enabled": True}},
        *longer(
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
            {"zero": {**TREE["zero"], "recompute": {"policy": "full", "modules": ["Block"]}}},
        ),
    ],
)
def test_with_other_settings_the_packed_weights_stay(pool: Pool, form: str, real: bool, more: dict[str, Any]) -> None:
    frozen = dict(Net(form, real).to("cpu").state_dict())
    (one,) = pool.run(1, trained, form, real, 3, **more)
    for losses, weights in pool.run(2, trained, form, real, 3, True, **more):
        assert losses[0] in one[0]
        assert same(weights, one[1])
        assert all(torch.equal(frozen[name], weights[name]) for name in frozen if ".up." in name or ".down." in name)


# --- where the bytes are ------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@every_kind
def test_bytes_are_those_of_the_format(form: str, real: bool) -> None:
    model = Net(form, real).to("cpu")
    numel, others = 2 * 2 * 2 * WIDTH * WIDTH, (2 * 2 * 4 + 1) * WIDTH * 4  # adapters, and the head
    frozen = [param for name, param in model.named_parameters() if ".up." in name or ".down." in name]
    packed, more = sum(param.nbytes for param in frozen), sum(each.nbytes for param in frozen for each in beside(param))
    assert packed == (numel if form == "int8" else numel // 2)
    planned = zero.estimate(model, config(3, 2, **TREE), 2, device="cpu").configured.device.parameters
    engine = engine_of(model, 3)
    train(engine)
    assert engine.state_nbytes().parameters == planned == packed // 2 + more + others // 2
    sent, send = 0, dist.isend

    def count(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += tensor.nbytes if tensor.dtype in (torch.uint8, torch.int8) else 0
        return send(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", count)
        train(engine, 3, 4)
    engine.destroy()
    # Each block once in the forward and once in the backward, but for the last, which is kept between the two.
    assert sent in (packed // 2 * 2, packed // 2 * 2 - packed // 4)


# --- out and in ---------------------------------------------------------------------------------------------


def saved(form: str, real: bool, folder: str) -> dict[str, torch.Tensor]:
    """Train two steps, save, and train one more; an engine over other random weights loads it and does the same."""
    engine = engine_of(Net(form, real).to("cpu"), 3)
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    assert engine.save_16bit_model(folder, "whole.safetensors")
    train(engine, 2, 3)
    weights = whole(engine)
    streamed = {name: value.clone() for name, value in engine.stream_weights()}
    assert all(torch.equal(streamed[name], weights[name]) for name in streamed)
    assert streamed.keys() == weights.keys()
    engine.destroy()
    return weights


def loaded(form: str, real: bool, folder: str, stage: int) -> tuple[Any, Any]:
    """What a checkpoint, and a state_dict, bring into a model with another base."""
    other = Net(form, real)
    for param in other.parameters():
        param.data.mul_(1.5)
    before = engine_of(other.to("cpu"), stage)
    before.load_checkpoint(folder)
    train(before, 2, 3)
    resumed = whole(before)
    before.destroy()
    other = Net(form, real)
    for param in other.parameters():
        param.data.mul_(0.3)
    engine = engine_of(other.to("cpu"), stage)
    engine.load_module_state_dict(resumed)
    again = whole(engine)
    engine.eval()
    with torch.no_grad(), engine.gathered_for_generation():
        outputs = [engine.module(batch) for batch in batches(1)]
    engine.destroy()
    return resumed, (again, outputs)


@every_kind
def test_what_is_saved_is_whole_and_loads_at_another_world_size(
    pool: Pool, tmp_path: Path, form: str, real: bool
) -> None:
    from safetensors.torch import load_file

    wanted, _ = pool.run(2, saved, form, real, str(tmp_path))
    model = Net(form, real).to("cpu").eval()
    for layer in model.modules():
        layer.support_avx512bf16_for_cpu = False  # it repacks and rounds in eval mode, which an engine forbids
    plain = model.state_dict()
    file = load_file(tmp_path / "whole.safetensors")
    assert file.keys() == plain.keys()  # as bitsandbytes saves it
    assert all(torch.equal(file[name], plain[name]) for name in plain if ".up." in name or ".down." in name)
    for world, stage in ((1, 2), (2, 3)):
        for resumed, (again, outputs) in pool.run(world, loaded, form, real, str(tmp_path), stage):
            assert same(resumed, wanted)
            assert same(again, wanted)
            with torch.no_grad():
                for name, param in model.named_parameters():
                    param.data.copy_(wanted[name])
                assert outputs == [model(batch) for batch in batches(1)]


# --- as bitsandbytes made them ------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@every_kind
def test_class_and_attributes_stay(form: str, real: bool) -> None:
    model = Net(form, real).to("cpu")
    weight = model.blocks[0].up.weight
    kind, shape, attributes = type(weight), weight.shape, set(vars(weight))
    state = getattr(weight, "quant_state", None)
    engine = engine_of(model, 3)

    def check() -> None:
        assert weight is model.blocks[0].up.weight
        assert isinstance(weight, kind)
        assert type(weight).__name__ == kind.__name__
        assert weight.shape == shape
        assert attributes <= set(vars(weight))
        assert getattr(weight, "quant_state", None) is state
        assert state is None or model.blocks[0].up.quant_state is state

    check()
    assert type(weight) is not kind  # it is away
    with pytest.raises(RuntimeError, match=r"'blocks.0.up.weight' is released"):
        weight.sum()
    with zero.GatheredParameters(weight):
        check()
        assert type(weight) is kind
        assert len(weight.unique()) > 100
    train(engine)
    check()
    said = str(engine.describe())
    assert form.removesuffix("-nested") in said
    engine.destroy()
    check()
    assert type(weight) is kind
    assert torch.isfinite(model(next(batches(2))))


@pytest.mark.ranks(2)
@every_kind
def test_it_is_quantised_where_it_is_built(form: str, real: bool) -> None:
    """Each block where the code calls its `to`, the last one by the end of `zero.Init`."""
    plain = Net(form, real, 3).to("cpu").state_dict()
    wide = []  # bytes of frozen weights that were not quantised, at the end of each block

    def pending(blocks: nn.Module) -> int:
        params = [param for name, param in blocks.named_parameters() if ".up." in name or ".down." in name]
        return sum(param.nbytes for param in params if param.dtype.is_floating_point)

    with zero.Init():
        model = Net(form, real, 0)
        torch.manual_seed(0)
        for _ in range(3):
            model.blocks.append(Block(form, real))
            if len(model.blocks) < 3:
                model.blocks[-1].to("cpu")
                model.head(torch.zeros(WIDTH))  # reads another module, so that this one is closed
            wide.append(pending(model.blocks))
    engine = engine_of(model, 3)
    weights = whole(engine)
    assert all(torch.equal(plain[name], weights[name]) for name in plain if "head" not in name)
    engine.destroy()
    assert wide == [0, 0, 2 * 2 * WIDTH * WIDTH * 4]
    assert pending(model.blocks) == 0


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("form", "what", "said"),
    [
        ("int8", "SCB", "is in int8 and has lost its SCB, "),
        ("nf4", "quant_state", "is in nf4 and has lost its quant_state, "),
        ("nf4", "trained", "is kept in nf4, which no optimizer trains, "),
        ("nf4", "packed", "was repacked for this CPU by a forward in eval mode, "),
    ],
)
def test_what_cannot_be_is_said(form: str, what: str, said: str) -> None:
    model = Net(form)
    layer = model.blocks[1].down
    if what == "trained":
        layer.weight.requires_grad_(True)
    else:
        model.to("cpu")
    if what == "packed":
        layer.weight.quant_state.packing_format_for_cpu = True
    elif what != "trained":
        setattr(layer.weight, what, None)
        layer.quant_state = None
    with pytest.raises(ValueError, match=f"^parameter 'blocks.1.down.weight' {said}"):
        engine_of(model, 3)
