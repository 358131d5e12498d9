"""The promise: inside `GatheredParameters` parameters are whole, and on leaving, what one rank wrote is everyone's
exact value, what nobody wrote keeps its exact master, and no rank is left waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from masters import exact, part
from models import batch, config, make_net, share, step
from torch import nn

import zero
from zero.core.owner import is_released, owner_of

ONE, TWO, THREE = "blocks.1.up.weight", "embed.weight", "head.bias"
MASTERS = ("", "fp32", "remainder")  # "": computes in fp32


def start(stage: int = 3, master: str = "fp32") -> Any:
    """An engine after two steps, so that masters are not what their parameters say."""
    world = dist.get_world_size()
    params = {"lr": 1e-2, "zero": {"master": master or "fp32"}}
    settings = config(
        stage, world, micro=2, bf16={"enabled": bool(master)}, optimizer={"type": "AdamW", "params": params}
    )
    engine, *_ = zero.initialize(model=make_net(blocks=2), config=settings)
    for index in range(2):
        step(engine, index)
    return engine


def masters_kept(stage: int, master: str) -> list[bool]:
    """Rank 1 opens three parameters, writes one, and one element of another past the version counter."""
    engine = start(stage, master)
    net, before = engine.module, exact(engine)
    one, two, three = map(net.get_parameter, (ONE, TWO, THREE))
    with torch.no_grad(), zero.GatheredParameters([one, two, three], modifier_rank=1):
        if dist.get_rank() == 1:
            two.copy_(two * 1)  # the same 16 bits: a write all the same
            three.data[3] = 7.0
        numel = three.numel()
    now = exact(engine)
    with zero.GatheredParameters([two, three]):
        wanted_two, wanted_three = two.detach().float().clone(), three.detach().float().clone()
    untouched = [torch.equal(now[name], value) for name, value in before.items() if name not in (TWO, THREE)]
    right = [torch.equal(now[TWO], part(engine, TWO, wanted_two)) if TWO in now else True, wanted_three[3] == 7.0]
    if THREE in now:
        changed = part(engine, THREE, torch.arange(numel) == 3)
        right.append(torch.equal(now[THREE][~changed], before[THREE][~changed]))
        right.append(bool((now[THREE][changed] == 7.0).all()))
    engine.destroy()
    return [*untouched, *map(bool, right)]


@pytest.mark.ranks(2)
def test_what_was_not_written_keeps_its_exact_master():
    found = {f"{stage} {master}": masters_kept(stage, master) for stage in (0, 2, 3) for master in MASTERS}
    for case, right in found.items():
        assert all(right), case


def given(kind: str, net: nn.Module, extra: nn.Parameter) -> Any:
    return {
        "one": net.get_parameter(ONE),
        "list": [net.get_parameter(ONE)],
        "twice, unsorted": [net.get_parameter(ONE), net.get_parameter(TWO), net.get_parameter(ONE)],
        "generator": (param for param in net.parameters()),
        "mixed with plain ones": [extra, net.get_parameter(ONE)],
        "empty": [],
        "plain only": (extra,),
    }[kind]


KINDS = ("one", "list", "twice, unsorted", "generator", "mixed with plain ones", "empty", "plain only")


def of_every_kind() -> dict[str, list[bool]]:
    engine = start()
    net, found = engine.module, {}
    extra = nn.Parameter(torch.ones(2))
    for kind in KINDS:
        before = [name for name, param in net.named_parameters() if not is_released(param)]
        with zero.GatheredParameters(given(kind, net, extra)):
            wanted = given(kind, net, extra)
            opened = [wanted] if isinstance(wanted, torch.Tensor) else list(wanted)
            whole = [not is_released(param) and bool(torch.isfinite(param).all()) for param in opened]
        after = [name for name, param in net.named_parameters() if not is_released(param)]
        found[kind] = [*whole, before == after == []]
    with zero.GatheredParameters(net.parameters(), enabled=False):
        found["disabled"] = [is_released(param) for param in net.parameters()]
    engine.destroy()
    return found


def test_what_may_be_given(pool):
    for found in pool.run(2, of_every_kind):
        for kind, right in found.items():
            assert all(right), kind


@pytest.mark.ranks(2)
def test_nested_blocks_lose_no_write():
    engine = start()
    param, other = engine.module.get_parameter(ONE), engine.module.get_parameter(TWO)
    rank, found = dist.get_rank(), {}

    def value(of: nn.Parameter = param) -> list[float]:
        with zero.GatheredParameters(of):
            return of.float().unique().tolist()

    with zero.GatheredParameters([param, other]):
        with zero.GatheredParameters(param):
            found["read in read"] = not is_released(param)
        found["still open"] = not is_released(param)
        with torch.no_grad(), zero.GatheredParameters([other, param], modifier_rank=1):
            param.fill_(2.0 + rank)
        found["seen by the outer"] = param.float().unique().tolist()
    found["write in read"] = value()
    with torch.no_grad(), zero.GatheredParameters(param, modifier_rank=0):
        param.fill_(5.0 + rank)
        with zero.GatheredParameters(param):
            param[0] = 4.0  # belongs to the block around
        with zero.GatheredParameters(param, modifier_rank=1):
            param[1] = 8.0 + rank
        param[2] = 10.0 + rank
    found["write in write"] = value()
    try:
        with torch.no_grad(), zero.GatheredParameters(param):
            with zero.GatheredParameters(param, modifier_rank=0):
                param.fill_(1.0)
            param.fill_(3.0)
    except RuntimeError as error:
        found["lost"] = str(error)
    found["kept"] = value()
    found["released"] = is_released(param) and is_released(other)
    engine.destroy()
    assert found["read in read"]
    assert found["still open"]
    assert found["seen by the outer"] == found["write in read"] == [3.0]
    assert found["write in write"] == [4.0, 6.0, 9.0, 10.0]  # rank 1's on leaving its block, rank 0's after
    assert found["lost"] == (
        f"['{ONE}'] changed inside GatheredParameters without modifier_rank, so the change would be lost; "
        "pass modifier_rank=0 to keep rank 0's values"
    )
    assert found["kept"] == [1.0]
    assert found["released"]


@pytest.mark.ranks(2)
def test_parameters_that_are_whole_already():
    """Blocks in a forward, when parameters are whole already, stay out of its way."""
    engine = start()
    param, found = engine.module.get_parameter(ONE), {}

    def inside(module: nn.Module, args: Any, output: Any) -> None:
        with zero.GatheredParameters(module.weight):
            pass
        found["whole"] = not is_released(param)

    handle = engine.module.blocks[1].up.register_forward_hook(inside)
    tokens, targets = batch(0, 2)
    engine.backward(engine(tokens, targets))
    engine.step()
    handle.remove()
    found["released"] = is_released(param)
    engine.destroy()
    assert found == {"whole": True, "released": True}


def raising(stage: int, rank: int) -> tuple[str, list[float], bool]:
    """One rank raises inside of a block that writes; all leave, and the engine goes on."""
    engine = start(stage)
    param, said = engine.module.get_parameter(ONE), ""
    try:
        with torch.no_grad(), zero.GatheredParameters(param, modifier_rank=1):
            param.fill_(2.0 + dist.get_rank())
            if dist.get_rank() == rank:
                raise KeyError("mine")
    except KeyError as error:
        said = str(error)
    with zero.GatheredParameters(param):
        values = param.float().unique().tolist()
    engine.backward(engine(*batch(0, 2)))
    engine.step()
    engine.destroy()
    return said, values, bool(torch.isfinite(param).all())


def raising_everywhere() -> list[Any]:
    return [raising(stage, rank) for stage in (1, 3) for rank in (0, 1)]


def test_an_exception_on_one_rank_leaves_nobody_waiting(pool):
    first, second = pool.run(2, raising_everywhere)
    assert [said for said, _, _ in first] == ["'mine'", ""] * 2
    assert [said for said, _, _ in second] == ["", "'mine'"] * 2
    assert all(values == [3.0] and finite for _, values, finite in first + second)


REPLACEMENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "same shape": lambda data: torch.full_like(data, 3.0),
    "transposed memory": lambda data: torch.full_like(data, 3.0).t().contiguous().t(),
    "shape": lambda data: data[:1].clone(),
    "dtype": lambda data: data.double(),
}


def replacing() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for stage in (1, 3):
        engine = start(stage)
        param = engine.module.get_parameter(ONE)
        shape, dtype = param.shape, param.dtype
        for name, change in REPLACEMENTS.items():
            said = ""
            try:
                with zero.GatheredParameters(param, modifier_rank=1):
                    if dist.get_rank() == 1:
                        param.data = change(param.data)
            except RuntimeError as error:
                said = str(error)
            with zero.GatheredParameters(param):
                kept = (param.shape, param.dtype) == (shape, dtype)
                found[f"{stage} {name}"] = (said, kept, bool((param == 3.0).all()))
            with zero.GatheredParameters(param, modifier_rank=0), torch.no_grad():
                param.fill_(1.0)
        engine.backward(engine(*batch(0, 2)))
        engine.step()
        engine.destroy()
    return found


def test_data_may_be_replaced_by_its_like_only(pool):
    for rank, found in enumerate(pool.run(2, replacing)):
        for case, (said, kept, taken) in found.items():
            assert kept, case
            fits = case.split(" ", 1)[1] in ("same shape", "transposed memory")
            assert taken == fits, case
            assert (said == "") == fits, case
            if said:
                assert said.startswith(f"['{ONE}']: the data of these parameters was replaced"), case
                assert ("(25, 12)" in said) == (rank == 1), case


@pytest.mark.ranks(2)
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


def refused() -> list[str]:
    engine = start()
    params, said = list(engine.module.parameters()), []
    for given, ways in (
        (params, {"modifier_rank": 2}),
        ([], {"modifier_rank": -1}),
        (params, {"modifier_rank": True}),
        (params, {"modifier_rank": "0"}),
        (engine.module, {}),
        ([params], {}),
        (None, {}),
    ):
        try:
            with zero.GatheredParameters(given, **ways):
                said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    engine.destroy()
    return said


def test_what_is_refused_before_anybody_waits(pool):
    for said in pool.run(2, refused):
        rank = "GatheredParameters(modifier_rank=...): got {}; wanted a rank from 0 to 1, or None"
        params = "GatheredParameters(params=...): got {}; wanted parameters"
        assert said == [
            *(rank.format(value) for value in ("2", "-1", "True", "'0'")),
            params.format("Net") + ", like module.parameters()",
            params.format("a list among them"),
            params.format("NoneType") + ", like module.parameters()",
        ]


@pytest.mark.ranks(2)
def test_a_built_model_can_be_read_and_loaded():
    """The same blocks on a model that no engine has yet."""
    with zero.Init():
        model = make_net()
        with zero.GatheredParameters(model.head.weight, modifier_rank=1), torch.no_grad():
            model.head.weight.fill_(2.0 + dist.get_rank())
        with zero.GatheredParameters(model.embed.weight, modifier_rank=1), torch.no_grad():
            model.embed.weight.fill_(4.0 + dist.get_rank())  # written as modifier 1; rank 0's if written without
    found = {}
    with zero.GatheredParameters([*model.parameters(), None]):  # the bias of a layer that has none
        found["inside"] = [param.unique().tolist() for param in (model.head.weight, model.embed.weight)]
    values = make_net(seed=9).state_dict()
    with zero.GatheredParameters(model.parameters(), modifier_rank=0):
        if dist.get_rank() == 0:
            model.load_state_dict(values)
    with zero.GatheredParameters(model.parameters()):
        found["loaded"] = all(torch.equal(param, values[name]) for name, param in model.named_parameters())
    try:
        with zero.GatheredParameters(model.head.weight), torch.no_grad():
            model.head.weight.zero_()
    except RuntimeError as error:
        found["lost"] = str(error)
    found["released"] = all(map(is_released, model.parameters()))
    assert found["inside"] == [[3.0], [5.0]]
    assert found["loaded"]
    assert found["lost"].startswith("['head.weight'] changed inside GatheredParameters without modifier_rank")
    assert found["released"]


def test_without_ranks():
    engine, *_ = zero.initialize(model=make_net(), config=config(3, 1))
    param = engine.module.get_parameter(ONE)
    with zero.GatheredParameters(param, modifier_rank=0), torch.no_grad():
        param.fill_(2.0)
    with pytest.raises(ValueError, match="wanted a rank from 0 to 0"):
        zero.GatheredParameters(param, modifier_rank=1)
    assert owner_of(param).unit.exact().eq(2.0).sum() >= param.numel()


def train_and_step_inside(alone: bool, disturbed: bool, **more: Any) -> tuple[list[torch.Tensor], list[str]]:
    """Weights after three steps and what was said; `disturbed`: each step is tried inside the block first."""
    rank, said = dist.get_rank(), []
    engine, *_ = zero.initialize(model=make_net(), config=config(3, 2, zero_optimization={"stage": 3, **more}))
    last = engine.module.get_parameter(THREE if alone else "blocks.2.up.weight")
    for index in range(3):
        engine.backward(engine(*share(index)))
        if disturbed:
            with zero.GatheredParameters([last] if rank == 0 or not alone else []):
                try:
                    engine.step()
                except RuntimeError as error:
                    said.append(str(error))
        engine.step()
    assert engine.global_steps == 3
    engine.destroy()
    return [param.detach() for param in engine.module.parameters()], said


def steps_inside(alone: bool, more: dict[str, Any]) -> tuple[bool, list[str]]:
    weights, said = train_and_step_inside(alone, True, **more)
    return all(map(torch.equal, weights, train_and_step_inside(alone, False, **more)[0])), said


WHOLE = {"stage3_param_persistence_threshold": 10**6}


@pytest.mark.parametrize("more", [{}, {"offload_optimizer": {"device": "cpu"}}], ids=["device", "host"])
@pytest.mark.parametrize("alone", [False, True], ids=["all ranks", "rank 0 alone"])
def test_a_step_inside_changes_nothing_and_works_outside(pool, alone, more):
    """One rank can be inside alone where the parameters stay whole; the other raises, too."""
    for rank, (same, said) in enumerate(pool.run(2, steps_inside, alone, {**more, **(WHOLE if alone else {})})):
        here = "" if alone and rank else f"; here ['{'<root>' if alone else 'blocks.2'}']"
        who = "rank 0" if alone else "ranks 0, 1"
        text = f"step() while GatheredParameters holds parameters open ({who}{here}); step outside of it"
        assert said == [text] * 3
        assert same
