"""The promise: inside `GatheredParameters` parameters are whole, and on leaving, what one rank wrote is everyone's
exact value, what nobody wrote keeps its exact master, and no rank is left waiting."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import make_net, step
from ranks import said_by
from scenario import differences, run, settings
from torch import nn

import zero
from zero.core.owner import is_released
from zero.utils import safe_get_full_fp32_param

pytestmark = pytest.mark.ranks(2)
ONE, TWO, THREE = "blocks.1.up.weight", "embed.weight", "head.bias"
MASTERS = ("", "fp32", "remainder")  # "": computes in fp32
OPEN = zero.GatheredParameters


def start(stage: int = 3, master: str = "fp32") -> Any:
    """An engine after two steps, so that masters are not what their parameters say."""
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "zero": {"master": master or "fp32"}}}
    made = settings(stage, dist.get_world_size(), precision="bf16" if master else "fp32", optimizer=optimizer)
    engine, *_ = zero.initialize(model=make_net(blocks=2), config=made)
    for index in range(2):
        step(engine, index)
    return engine


def value(*params: nn.Parameter) -> list[float]:
    with OPEN(params):
        return torch.cat([param.float().flatten() for param in params]).unique().tolist()


def goes_on(engine: Any) -> None:
    step(engine, 2)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_was_not_written_keeps_its_exact_master(stage):
    """Rank 1 opens three parameters, writes one, and one element of another past the version counter."""
    for master in MASTERS:
        engine = start(stage, master)
        net = engine.module
        one, two, three = map(net.get_parameter, (ONE, TWO, THREE))
        wanted = {name: safe_get_full_fp32_param(param).clone() for name, param in net.named_parameters()}
        with torch.no_grad(), OPEN([one, two, three], modifier_rank=1):
            if dist.get_rank() == 1:
                two.copy_(two * 1)  # the same 16 bits: a write all the same
                three.data[3] = 7.0
        with OPEN([two, three]):
            wanted[TWO], wanted[THREE][3] = two.detach().float().clone(), 7.0
        for name, param in net.named_parameters():
            assert torch.equal(safe_get_full_fp32_param(param), wanted[name]), f"{master} {name}"
        engine.destroy()


def test_what_may_be_given():
    engine = start()
    net, extra = engine.module, nn.Parameter(torch.ones(2))
    one, two = net.get_parameter(ONE), net.get_parameter(TWO)
    for given in (one, [one], [one, two, one], list(net.parameters()), [extra, one], [], (extra,)):
        opened = [given] if isinstance(given, torch.Tensor) else given
        with OPEN(given if len(opened) < 5 else net.parameters()):  # a generator
            assert all(not is_released(param) and param.isfinite().all() for param in opened)
        assert all(map(is_released, net.parameters())) and not is_released(extra)
    with OPEN(net.parameters(), enabled=False):
        assert all(map(is_released, net.parameters()))
    engine.destroy()


def test_nested_blocks_lose_no_write():
    engine = start()
    param, other = engine.module.get_parameter(ONE), engine.module.get_parameter(TWO)
    rank = dist.get_rank()
    with OPEN([param, other]):
        with OPEN(param):
            assert not is_released(param)
        assert not is_released(param)
        with torch.no_grad(), OPEN([other, param], modifier_rank=1):
            param.fill_(2.0 + rank)
        assert param.float().unique().tolist() == [3.0], "seen by the outer one"
    assert value(param) == [3.0]
    with torch.no_grad(), OPEN(param, modifier_rank=0):
        param.fill_(5.0 + rank)
        with OPEN(param):
            param[0] = 4.0  # belongs to the block around
        with OPEN(param, modifier_rank=1):
            param[1] = 8.0 + rank
        param[2] = 10.0 + rank
    assert value(param) == [4.0, 6.0, 9.0, 10.0]  # rank 1's on leaving its block, rank 0's after
    with pytest.raises(RuntimeError) as lost, torch.no_grad(), OPEN(param):
        with OPEN(param, modifier_rank=0):
            param.fill_(1.0)
        param.fill_(3.0)
    assert str(lost.value) == (
        f"['{ONE}'] changed inside GatheredParameters without modifier_rank, so the change would be lost; "
        "pass modifier_rank=0 to keep rank 0's values"
    )
    assert value(param) == [1.0]
    assert is_released(param) and is_released(other)
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_an_exception_on_one_rank_leaves_nobody_waiting(stage):
    """One rank raises inside of a block that writes; all leave, and the engine goes on."""
    engine, rank = start(stage), dist.get_rank()
    param = engine.module.get_parameter(ONE)
    for raises in (0, 1):
        said = ""
        try:
            with torch.no_grad(), OPEN(param, modifier_rank=1):
                param.fill_(2.0 + rank + raises)
                if rank == raises:
                    raise KeyError("mine")
        except KeyError as error:
            said = str(error)
        assert said == ("'mine'" if rank == raises else "")
        assert value(param) == [3.0 + raises]
    goes_on(engine)
    assert param.isfinite().all()


REPLACEMENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "same shape": lambda data: torch.full_like(data, 3.0),
    "transposed memory": lambda data: torch.full_like(data, 3.0).t().contiguous().t(),
    "shape": lambda data: data[:1].clone(),
    "dtype": lambda data: data.double(),
}


@pytest.mark.parametrize("stage", [1, 3])
def test_data_may_be_replaced_by_its_like_only(stage):
    engine, rank = start(stage), dist.get_rank()
    param = engine.module.get_parameter(ONE)
    shape, dtype = param.shape, param.dtype

    def replace(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        with OPEN(param, modifier_rank=1):
            if rank == 1:
                param.data = change(param.data)

    for name, change in REPLACEMENTS.items():
        said = said_by(functools.partial(replace, change))
        with OPEN(param):
            assert (param.shape, param.dtype) == (shape, dtype), name
            taken = bool((param == 3.0).all())
        fits = name in ("same shape", "transposed memory")
        assert (taken, said == "nothing") == (fits, fits), name
        if not fits:
            assert said.startswith(f"RuntimeError: ['{ONE}']: the data of these parameters was replaced"), name
            assert ("(25, 12)" in said) == (rank == 1), name
        with OPEN(param, modifier_rank=0), torch.no_grad():
            param.fill_(1.0)
    goes_on(engine)


def test_what_a_graph_reads_is_kept_until_it_changes():
    """A graph that reads weights finds them until they change; where there is none, nothing is kept."""
    engine, found = start(master=""), {}
    params = list(engine.module.parameters())
    whole = sum(param.numel() * 4 for param in params)

    def shown() -> int:
        """Bytes of memory behind parameters that look released."""
        with torch._C.DisableTorchFunctionSubclass():
            memory = [param.untyped_storage() for param in params]
        return (
            sum({each.data_ptr(): each.nbytes() for each in memory}.values()) if all(map(is_released, params)) else -1
        )

    with zero.GatheredParameters(params):
        sum(param.square().sum() for param in params).item()
    found["no graph"] = 0 < shown() < whole / 2
    with zero.GatheredParameters(params):
        term = sum(param.square().sum() for param in params)
    found["a graph"] = shown() >= whole
    term.backward(retain_graph=True)
    engine.step()
    found["after the step"] = 0 < shown() < whole / 2
    try:
        term.backward()
    except RuntimeError as error:
        found["stale"] = "modified by an inplace operation" in str(error)
    assert list(found.values()) == [True] * 4, found


def test_what_is_refused_before_anybody_waits():
    engine = start()
    params = list(engine.module.parameters())
    rank = "ValueError: GatheredParameters(modifier_rank=...): got {}; wanted a rank from 0 to 1, or None"
    wanted = "ValueError: GatheredParameters(params=...): got {}; wanted parameters"
    for given, ways, text in (
        (params, {"modifier_rank": 2}, rank.format("2")),
        ([], {"modifier_rank": -1}, rank.format("-1")),
        (params, {"modifier_rank": True}, rank.format("True")),
        (params, {"modifier_rank": "0"}, rank.format("'0'")),
        (engine.module, {}, wanted.format("Net") + ", like module.parameters()"),
        ([params], {}, wanted.format("a list among them")),
        (None, {}, wanted.format("NoneType") + ", like module.parameters()"),
    ):
        assert said_by(lambda given=given, ways=ways: OPEN(given, **ways).__enter__()) == text
    engine.destroy()


def tried_inside(alone: bool, said: list[str], engine: Any, number: int, args: Any) -> torch.Tensor:
    """Backward, and each step is tried inside a block first."""
    engine.backward(loss := engine(*args))
    last = engine.module.get_parameter(THREE if alone else "blocks.2.up.weight")
    with OPEN([last] if dist.get_rank() == 0 or not alone else []):
        said.append(said_by(engine.step))
    return loss


WHOLE = {"stage3_param_persistence_threshold": 10**6}


@pytest.mark.parametrize("section", [{}, {"offload_optimizer": {"device": "cpu"}}], ids=["device", "host"])
@pytest.mark.parametrize("alone", [False, True], ids=["all ranks", "rank 0 alone"])
def test_a_step_inside_changes_nothing_and_works_outside(alone, section):
    """One rank can be inside alone where the parameters stay whole; the other raises, too."""
    json, said = {"stage": 3, "section": {**section, **(WHOLE if alone else {})}}, []
    found = run("net", json, loop=functools.partial(tried_inside, alone, said))
    here = "" if alone and dist.get_rank() else f"; here ['{'<root>' if alone else 'blocks.2'}']"
    who = "rank 0" if alone else "ranks 0, 1"
    text = f"HeldOpen: step() while GatheredParameters holds parameters open ({who}{here}); step outside of it"
    assert said == [text] * 3
    assert found.steps == 3 and not differences(found, run("net", json))
