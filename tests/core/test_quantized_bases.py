"""The promise: frozen weights of bitsandbytes in 4 or 8 bits are cut, gathered and kept as they are packed.

The short cases are of a stand-in for bitsandbytes (tests/packed.py), the long ones of the library itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer, needs
from packed import WIDTH, Block, Net
from ranks import Pool
from scenario import Model, run, settings
from torch import nn

import zero
from zero.core.quantized_params import quant_tensors

pytestmark = pytest.mark.ranks(2)
installed = needs("bitsandbytes")
TREE = {"reduce": "tree"}


def kinds(*forms: str) -> list[Any]:
    """(format, whether by bitsandbytes itself): the two kinds of the stand-in, and long ones."""
    real = [pytest.param(form, True, marks=[installed, pytest.mark.long]) for form in forms]
    return [("nf4-nested", False), ("int8", False), *longer(("nf4", False)), *real]


every_kind = pytest.mark.parametrize(("form", "real"), kinds("nf4-nested", "fp4", "int8"))


def inputs(number: int, part: int) -> tuple[torch.Tensor]:
    """Of two micro-batches in a step, over all ranks."""
    return (torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number // 2)).chunk(2)[number % 2],)


def made(form: str, real: bool, init: bool = False, factor: float = 1.0) -> nn.Module:
    """Quantised by its `to`, or built under `zero.Init`; `factor`: of its weights before."""
    with zero.Init() if init else contextlib.nullcontext():
        model = Net(form, real)
    for param in model.parameters() if factor != 1.0 else ():
        param.data.mul_(factor)
    return model if init else model.to("cpu")


def whole(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.module_state_dict().items()}


def trained(
    form: str, real: bool, json: Any, steps: int = 3, init: bool = False, factor: float = 1.0, **how: Any
) -> Any:
    """A record, of which `seen` are the whole weights."""
    model = Model(functools.partial(made, form, real, init, factor), inputs)
    return run(model, {"zero": TREE, **json}, steps, parts=2, **{"keep": whole, **how})


def engine_of(model: nn.Module) -> Any:
    return zero.initialize(model=model, config=settings({"stage": 3, "zero": TREE}, dist.get_world_size()))[0]


def train(engine: Any, count: int = 3) -> None:
    for number in range(count):
        engine.backward(engine(*inputs(number, 0)))
        engine.step()


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def packed_names(names: Iterable[str]) -> list[str]:
    return [name for name in names if ".up." in name or ".down." in name]


# --- the same numbers ---------------------------------------------------------------------------------------


def plainly(form: str, real: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same without zero."""
    model = made(form, real)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2, weight_decay=0.1)
    losses = []
    for number in range(6):
        loss = model(*inputs(number, 0))
        (loss / 2).backward()
        losses.append(loss.item())
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses, dict(model.state_dict())


@every_kind
def test_two_ranks_train_as_one_does(pool: Pool, form: str, real: bool) -> None:
    (one,) = pool.run(1, trained, form, real, {"stage": 0})
    losses, plain = plainly(form, real)
    assert one.losses[:2] == losses[:2]
    assert one.losses == pytest.approx(losses, rel=1e-5)
    frozen = [name for name in plain if not (".first." in name or ".second." in name)]
    assert len(frozen) >= 9
    assert all(torch.equal(one.seen[0][name], plain[name]) for name in frozen)
    for stage, init in ((1, False), (3, False), (3, True)):
        ranks = pool.run(2, trained, form, real, {"stage": stage}, init=init)
        assert [each for pair in zip(*(record.losses for record in ranks), strict=True) for each in pair] == one.losses
        assert all(same(record.seen[0], one.seen[0]) for record in ranks), (stage, init)


@pytest.mark.parametrize(("form", "real"), [("nf4-nested", False), *longer(("int8", False)), *kinds("nf4-nested")[3:]])
@pytest.mark.parametrize(
    "more",
    [
        {"precision": "bf16"},
        *longer(
            {"section": {"offload_param": {"device": "cpu"}}},
            {"zero": {**TREE, "recompute": {"policy": "full", "modules": ["Block"]}}},
        ),
    ],
)
def test_with_other_settings_the_packed_weights_stay(pool: Pool, form: str, real: bool, more: dict[str, Any]) -> None:
    packed = made(form, real).state_dict()
    (one,) = pool.run(1, trained, form, real, {"stage": 3, **more})
    for found in pool.run(2, trained, form, real, {"stage": 3, **more}, init=True):
        assert found.losses[0] in one.losses
        assert same(found.seen[0], one.seen[0])
        assert all(torch.equal(packed[name], found.seen[0][name]) for name in packed_names(packed))


# --- where the bytes are ------------------------------------------------------------------------------------


@every_kind
def test_bytes_are_those_of_the_format(form: str, real: bool) -> None:
    model = Net(form, real).to("cpu")
    numel, others = 2 * 2 * 2 * WIDTH * WIDTH, (2 * 2 * 4 + 1) * WIDTH * 4  # adapters, and the head
    frozen = [model.get_parameter(name) for name in packed_names(dict(model.named_parameters()))]
    packed, more = (
        sum(param.nbytes for param in frozen),
        sum(each.nbytes for param in frozen for each in quant_tensors(param)),
    )
    assert packed == (numel if form == "int8" else numel // 2)
    planned = zero.estimate(
        model, settings({"stage": 3, "zero": TREE}, 2), 2, device="cpu"
    ).configured.device.parameters
    engine = engine_of(model)
    train(engine)
    assert engine.state_nbytes().parameters == planned == packed // 2 + more + others // 2
    sent, send = 0, dist.isend

    def count(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += tensor.nbytes if tensor.dtype in (torch.uint8, torch.int8) else 0
        return send(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", count)
        train(engine, 1)
    engine.destroy()
    # Each block once in the forward and once in the backward, but for the last, which is kept between the two.
    assert sent in (packed // 2 * 2, packed // 2 * 2 - packed // 4)


# --- out and in ---------------------------------------------------------------------------------------------


def write(folder: str, engine: Any) -> None:
    """Beside its checkpoint; what is streamed is what is whole."""
    assert engine.save_16bit_model(folder, "whole.safetensors")
    assert same({name: value.clone() for name, value in engine.stream_weights()}, whole(engine))


def loaded(form: str, real: bool, state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """What a state_dict brings into a model with another base, and what that computes."""
    engine = engine_of(made(form, real, factor=0.3))
    engine.load_module_state_dict(state)
    again = whole(engine)
    engine.eval()
    with torch.no_grad(), engine.gathered_for_generation():
        outputs = [engine.module(*inputs(number, 0)) for number in range(6)]
    engine.destroy()
    return again, outputs


@every_kind
def test_what_is_saved_is_whole_and_loads_at_another_world_size(
    pool: Pool, tmp_path: Path, form: str, real: bool
) -> None:
    """Into a model with another base, which goes on as the run that was saved."""
    from safetensors.torch import load_file

    folder, json = str(tmp_path), {"stage": 3}
    wanted = pool.run(2, trained, form, real, json)[0].seen[0]
    pool.run(2, trained, form, real, json, 2, save=folder, keep=functools.partial(write, folder))
    model = made(form, real).eval()
    for layer in model.modules():
        layer.support_avx512bf16_for_cpu = False  # it repacks and rounds in eval mode, which an engine forbids
    plain = model.state_dict()
    file = load_file(tmp_path / "whole.safetensors")
    assert file.keys() == plain.keys()  # as bitsandbytes saves it
    assert all(torch.equal(file[name], plain[name]) for name in packed_names(plain))
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.data.copy_(wanted[name])
        outputs = [model(*inputs(number, 0)) for number in range(6)]
    for world, stage in ((1, 2), (2, 3)):
        for record in pool.run(world, trained, form, real, {"stage": stage}, 1, factor=1.5, first=2, load=folder):
            assert same(record.seen[0], wanted)
    for again, found in pool.run(2, loaded, form, real, wanted):
        assert same(again, wanted) and found == outputs


# --- as bitsandbytes made them ------------------------------------------------------------------------------


@every_kind
def test_class_and_attributes_stay(form: str, real: bool) -> None:
    model = Net(form, real).to("cpu")
    weight = model.blocks[0].up.weight
    kind, shape, attributes = type(weight), weight.shape, set(vars(weight))
    state = getattr(weight, "quant_state", None)
    engine = engine_of(model)

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
    assert torch.isfinite(model(*inputs(0, 0)))


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
    engine = engine_of(model)
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
        engine_of(model)
