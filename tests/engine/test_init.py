"""The promise: a model built under `zero.Init` is cut over the ranks, and bitwise the one that plain torch builds."""

from __future__ import annotations

import io
import logging
import os
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from built_models import BUILDERS, build
from marks import longer
from models import Net, batch, config, make_net, train
from torch import nn
from torch.nn.modules import module as hooks_of_torch

import zero
from zero import log
from zero.core.owner import is_released, owner_of
from zero.launch.contract import SETS


def hooks() -> int:
    return len(hooks_of_torch._global_parameter_registration_hooks) + len(
        hooks_of_torch._global_module_registration_hooks
    )


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers, under every name they have."""
    with zero.GatheredParameters(model.parameters()):
        found = {name: param.detach().clone() for name, param in model.named_parameters(remove_duplicate=False)}
    return found | {name: buffer.clone() for name, buffer in model.named_buffers()}


def groups(model: nn.Module) -> list[list[str]]:
    """Names that share one parameter."""
    found: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(param), []).append(name)
    return sorted(found.values())


def facts(model: nn.Module) -> dict[str, Any]:
    return {
        name: (param.shape, param.dtype, param.requires_grad, isinstance(param, nn.Parameter))
        for name, param in model.named_parameters()
    }


def same(one: nn.Module, other: nn.Module) -> str:
    """How two models differ; nothing if they do not."""
    if list(dict(one.named_modules())) != list(dict(other.named_modules())):
        return "modules"
    if groups(one) != groups(other) or facts(one) != facts(other):
        return f"structure: {facts(one)} is not {facts(other)}"
    mine, theirs = values(one), values(other)
    if mine.keys() != theirs.keys():
        return f"names: {mine.keys()} are not {theirs.keys()}"
    differing = [name for name, value in mine.items() if not torch.equal(value, theirs[name])]
    return f"values of {differing}" if differing else ""


def built_alike() -> dict[str, Any]:
    """Of each model: how it differs from the plain one, whether random numbers were drawn alike, what was not cut."""
    found = {}
    for name in BUILDERS:
        plain = build(name)
        drawn = torch.get_rng_state()
        with zero.Init():
            model = build(name)
        cut = [key for key, param in model.named_parameters() if not is_released(param)]
        found[name] = (torch.equal(drawn, torch.get_rng_state()), cut, same(model, plain))
    return found | {"hooks": hooks()}


@pytest.mark.parametrize("world", [1, 3, *longer(2)])
def test_weights_are_those_of_plain_construction(pool, world):
    for found in pool.run(world, built_alike):
        assert found.pop("hooks") == 0
        for name, (random, whole, difference) in found.items():
            assert random, f"{name}: the random numbers were drawn in another way"
            assert not difference, f"{name}: {difference}"
            if world > 1:
                assert whole == (["long"] if name == "frozen" else []), name  # int64 is no dtype of a unit


def rank_0_counts() -> list[Any]:
    """Every rank draws its own numbers."""
    rank, found = dist.get_rank(), []
    for name in BUILDERS:
        with zero.Init():
            model = build(name, seed=5 + rank)
        mine = {key: value for key, value in values(model).items() if key in dict(model.named_parameters())}
        wanted = values(build(name, seed=5))
        found.append((name, [key for key, value in mine.items() if not torch.equal(value, wanted[key])]))
    return found


def test_rank_0s_numbers_are_everyones(pool):
    for found in pool.run(2, rank_0_counts):
        for name, differing in found:
            assert not differing, f"{name}: {differing}"


def held_after(ways: dict[str, Any]) -> tuple[int, int]:
    """Bytes of this rank's shards, and of the whole model."""
    with zero.Init(**ways):
        model = make_net(blocks=4, width=32)
    mine = sum(owner_of(param).unit.shard.untyped_storage().nbytes() for param in model.parameters())
    whole = sum(param.numel() * param.element_size() for param in model.parameters())
    alive = sum(param.untyped_storage().nbytes() for param in model.parameters() if not is_released(param))
    return mine + alive, whole


def test_a_rank_holds_its_shard_only(pool):
    for mine, whole in pool.run(4, held_after, {}):
        assert whole / 4 <= mine <= 1.1 * whole / 4 + 26 * 64  # 26 parameters, each padded to a line
    for mine, _ in pool.run(4, held_after, {"remote_device": "cpu", "pin_memory": True}):
        assert mine <= 1.1 * whole / 4 + 26 * 64


def cut_by_launcher(stage: int) -> bool:
    """Whether a model is cut where `zero run` got this stage, and the script says none."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(SETS, f'["zero_optimization.stage={stage}", "train_micro_batch_size_per_gpu=1"]')
        with zero.Init():
            model = make_net()
    return all(is_released(param) for param in model.parameters())


def test_the_configuration_of_the_launcher_counts(pool):
    assert pool.run(2, cut_by_launcher, 1) == [False, False]
    assert pool.run(2, cut_by_launcher, 3) == [True, True]


def trained() -> list[bool]:
    """For each way of building and each stage: whether three steps give the bits of a plain start."""
    same_bits = []
    for stage in range(4):
        settings = config(stage, 2, accumulation=1, bf16={"enabled": stage in (1, 3)})
        plain = train(make_net(), 2, settings, steps=3)
        with zero.Init():
            built = make_net()
        with zero.Init():
            half = Net()  # a mixed one: parts are plain, parts from one block or another
        torch.manual_seed(7)
        mixed = Net()
        with zero.GatheredParameters(half.parameters(), modifier_rank=0):
            half.load_state_dict(mixed.state_dict())
        half.head, half.blocks[1] = mixed.head, mixed.blocks[1]
        half.blocks[0].down = zero_built_copy(mixed.blocks[0].down)
        inside = train_inside(settings)
        for found in (train(built, 2, settings, steps=3), train(half, 2, settings, steps=3), inside):
            equal = all(torch.equal(found["params"][name], value) for name, value in plain["params"].items())
            same_bits.append(equal and found["losses"] == plain["losses"])
    return same_bits


def zero_built_copy(layer: nn.Linear) -> nn.Linear:
    """The same layer, cut where it stands."""
    zero.Init(module=layer)
    return layer


def train_inside(settings: dict[str, Any]) -> dict[str, Any]:
    """`initialize` in the block that builds."""
    with zero.Init():
        return train(make_net(), 2, settings, steps=3)


def test_initialize_takes_over_built_and_mixed_models(pool):
    for same_bits in pool.run(2, trained):
        assert same_bits == [True] * 12


def built_net() -> nn.Module:
    with zero.Init():
        return make_net()


@pytest.mark.ranks(2)
def test_what_was_built_is_not_sent_again():
    """Broadcasts of parameters at `initialize`: of a plain model, of a built one; and units that stay whole."""
    counts = []
    for build_it in (make_net, built_net):
        model = build_it()
        with pytest.MonkeyPatch.context() as patch:
            seen: list[int] = []
            broadcast = zero.core.comm.broadcast
            patch.setattr(zero.core.comm, "broadcast", lambda *args, b=broadcast, s=seen: (s.append(1), b(*args))[1])
            engine, *_ = zero.initialize(model=model, config=config(3, 2))
        counts.append(len(seen))
        whole = sum(not is_released(param) for param in engine.module.parameters())
        engine.destroy()
    assert counts == [4, 0]  # of plain units, and of built ones
    assert whole == 0


def arguments() -> dict[str, Any]:
    found: dict[str, Any] = {}
    plain = make_net()

    def released(**ways: Any) -> list[bool]:
        with zero.Init(**ways):
            model = make_net()
        return sorted({is_released(param) for param in model.parameters()})

    found["enabled"] = released(enabled=False)
    auto = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}
    for stage in (0, 1, 2, 3):
        found[f"stage {stage}"] = released(config_dict_or_path={**auto, "zero_optimization": {"stage": stage}})
    found["config"] = released(config={"zero_optimization": {"stage": 3}, "train_batch_size": 4})
    with zero.Init(dtype=torch.bfloat16):
        model = build("frozen")
    wanted = {name: value.detach() for name, value in build("frozen").named_parameters()}
    with zero.GatheredParameters(model.parameters()):
        found["dtype"] = all(
            torch.equal(param, wanted[name].bfloat16() if wanted[name].is_floating_point() else wanted[name])
            and param.dtype == (torch.bfloat16 if wanted[name].is_floating_point() else wanted[name].dtype)
            for name, param in model.named_parameters()
        )
    whole = make_net()
    made = zero.Init(module=whole)
    found["module"] = (type(made).__name__, all(map(is_released, whole.parameters())), same(whole, plain), hooks())
    zero.Init(module=whole)  # of which all is cut already
    whole.extra = nn.Linear(2, 2)
    zero.Init(module=whole)  # and of which a part is
    found["again"] = all(map(is_released, whole.parameters()))
    with zero.Init():
        with zero.Init(enabled=False), zero.Init(dtype=torch.float16):
            inner = make_net()
        between = hooks()
        outer = make_net()
        zero.Init(module=(late := make_net()))
    found["nested"] = (between, hooks(), same(inner, plain), same(outer, plain), same(late, plain))
    return found


def test_arguments(pool):
    for found in pool.run(2, arguments):
        assert found["enabled"] == [False]
        assert [found[f"stage {stage}"] for stage in range(4)] == [[False], [False], [False], [True]]
        assert found["config"] == [True]
        assert found["dtype"]
        assert found["module"] == ("Init", True, "", 0)
        assert found["again"]
        assert found["nested"] == (2, 0, "", "", "")


@pytest.mark.parametrize(
    ("ways", "said"),
    [
        *(
            ({name: object()}, f"Init({name}=...)")
            for name in (
                *("data_parallel_group", "zero_param_parallel_group", "sequence_data_parallel_group"),
                *("param_swapper", "tensor_overrides"),
            )
        ),
        ({"mpu": object()}, "mpu: got a object; wanted an object with get_data_parallel_group()"),
        ({"zero_quantized_weights": True}, "Init(zero_quantized_weights=...)"),
        ({"zero_quantized_nontrainable_weights": True}, "Init(zero_quantized_nontrainable_weights=...)"),
        ({"remote_device": "moon"}, "got 'moon'"),
        ({"dtype": torch.int8}, "Init(dtype=...)"),
        ({"dtype": "bf16"}, "Init(dtype=...)"),
        ({"module": []}, "Init(module=...): got list"),
        ({"config": {}, "config_dict_or_path": {}}, "config and config_dict_or_path, which say the same"),
        ({"config": {"zero_optimization": {"stge": 3}}}, "unknown key 'stge'"),
    ],
)
def test_what_is_not_there_is_refused_by_name(ways, said):
    with pytest.raises(ValueError) as caught:
        zero.Init(**ways)
    assert said in str(caught.value)
    assert hooks() == 0


def test_one_rank_needs_no_block():
    with zero.Init(dtype=torch.bfloat16, remote_device="cpu"):
        model = make_net()
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert all(owner_of(param) is None for param in model.parameters())
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(model.parameters(), make_net().parameters(), strict=True))


READERS = {
    "pickle": pickle.dumps,
    "save": lambda model: torch.save(model, io.BytesIO()),
    "forward": lambda model: model(*batch(0, 2)),
    "float": lambda model: model.float(),
    "initialise": lambda model: nn.init.zeros_(model.head.weight),
    "engine's": None,
}


def refusals() -> dict[str, str]:
    with zero.Init():
        model = make_net()
    engine, *_ = zero.initialize(model=make_net(), config=config(3, 2))
    said = {}
    for name, reader in READERS.items():
        try:
            zero.Init(module=engine.module) if reader is None else reader(model)
            said[name] = "nothing"
        except (RuntimeError, ValueError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    engine.destroy()
    return said


def test_reading_outside_raises_with_the_full_name(pool):
    for said in pool.run(2, refusals):
        assert said.pop("engine's").startswith("ValueError: Init(module=...): parameter 'embed.weight' belongs to")
        first = "RuntimeError: parameter 'embed.weight' is released; read it inside zero.GatheredParameters(...)"
        for name, text in said.items():
            wanted = first.replace("embed.weight", "head.weight" if name == "initialise" else "embed.weight")
            assert text.startswith(wanted), name


@pytest.mark.ranks(2)
def test_an_exception_in_the_block_leaves_nothing_behind():
    """The block raises on all ranks; the next one works."""
    kept: list[nn.Module] = []

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kept.append(self)
            self.done = nn.Linear(3, 3)
            self.open = nn.Parameter(torch.ones(3))
            raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"), zero.Init():
        Broken()
    left = [is_released(kept[0].done.weight), owner_of(kept[0].open) is None, kept[0].open.sum().item() == 3]
    with zero.Init():
        model = make_net()
    assert hooks() == 0
    assert all(left)
    assert not same(model, make_net())


def adapted() -> tuple[list[float], bool]:
    """A module attached to a live engine's model runs in its forward and stays as it is."""
    with zero.Init():
        model = make_net()
    engine, *_ = zero.initialize(model=model, config=config(3, 2))
    torch.manual_seed(3)
    engine.module.blocks[0].up = nn.Sequential(engine.module.blocks[0].up, nn.Linear(25, 25))
    before = engine.module.blocks[0].up[1].weight.detach().clone()
    losses = []
    for index in range(3):
        loss = engine(*batch(index, 4))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    kept = torch.equal(engine.module.blocks[0].up[1].weight, before)
    engine.destroy()
    return losses, kept


def test_a_module_attached_later_runs(pool):
    (first, kept), (second, _) = pool.run(2, adapted)
    assert kept
    assert first == second
    assert len(set(first)) == 3


def test_a_module_attached_later_is_named_once(caplog):
    model = make_net()
    engine, *_ = zero.initialize(model=model, config=config(0, 1))
    model.blocks[0].up = nn.Sequential(model.blocks[0].up, nn.Linear(25, 25))
    log._said.cache_clear()
    for index in range(2):
        engine.backward(engine(*batch(index, 2)))
        with caplog.at_level(logging.WARNING, logger="zero"):
            engine.step()
    engine.destroy()
    said = [message for message in caplog.messages if "came into the model" in message]
    assert len(said) == 1
    assert said[0].startswith("parameter 'blocks.0.up.1.weight' came into the model after initialize()")


def joined(port: int) -> tuple[int, bool]:
    """Without a process group, the environment tells which ranks there are; other threads build as ever."""
    dist.barrier()  # a rank that is still connecting must find the others there
    dist.destroy_process_group()
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update(launched)
    built: list[nn.Module] = []
    try:
        with zero.Init():
            thread = threading.Thread(target=lambda: built.append(make_net()))
            thread.start()
            thread.join()
            model = make_net()
        plain = all(owner_of(param) is None for param in built[0].parameters())
        return dist.get_world_size(), plain and all(map(is_released, model.parameters()))
    finally:
        for name in launched:
            del os.environ[name]


def test_it_joins_the_process_group_and_leaves_other_threads_alone(pool):
    # As under torchrun, the launcher keeps the store: a port that is only looked up can be somebody else's by the time
    # that rank 0 listens there, and a store that rank 0 keeps ends with its group, while rank 1 may still need it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert pool.run(2, joined, store.port) == [(2, True)] * 2
