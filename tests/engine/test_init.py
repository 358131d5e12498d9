"""The promise: a model built under `zero.Init` is cut over the ranks, and bitwise the one that plain torch builds.

It may be copied, and in a later block changed, as a plain one.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from built_models import BUILDERS, build
from marks import longer
from models import WIDTH, Net, batch, config, make_net
from ranks import said_by
from scenario import Model, run, same
from torch import nn
from torch.nn.modules import module as hooks_of_torch

import zero
from zero.core.owner import is_released, owner_of
from zero.launch.contract import SETS

pytestmark = pytest.mark.ranks(2)


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


def differing(one: nn.Module, other: nn.Module) -> str:
    """How two models differ; nothing if they do not."""
    if list(dict(one.named_modules())) != list(dict(other.named_modules())):
        return "modules"
    if groups(one) != groups(other) or facts(one) != facts(other):
        return f"structure: {facts(one)} is not {facts(other)}"
    mine, theirs = values(one), values(other)
    if mine.keys() != theirs.keys():
        return f"names: {mine.keys()} are not {theirs.keys()}"
    wrong = [name for name, value in mine.items() if not torch.equal(value, theirs[name])]
    return f"values of {wrong}" if wrong else ""


@pytest.mark.ranks()
@pytest.mark.parametrize("world", [1, 3, *longer(2)])
def test_weights_are_those_of_plain_construction(world):
    for name in BUILDERS:
        plain = build(name)
        drawn = torch.get_rng_state()
        with zero.Init():
            model = build(name)
        assert torch.equal(drawn, torch.get_rng_state()), f"{name}: random numbers were drawn in another way"
        assert hooks() == 0
        whole = [key for key, param in model.named_parameters() if not is_released(param)]
        assert not (difference := differing(model, plain)), f"{name}: {difference}"
        if world > 1:
            assert whole == (["long"] if name == "frozen" else []), name  # int64 is no dtype of a unit


def test_rank_0s_numbers_are_everyones():
    """Every rank draws its own numbers."""
    for name in BUILDERS:
        with zero.Init():
            model = build(name, seed=5 + dist.get_rank())
        mine, wanted = values(model), values(build(name, seed=5))
        for key, _ in model.named_parameters():
            assert torch.equal(mine[key], wanted[key]), f"{name}: {key}"


def held_after(ways: dict[str, Any]) -> tuple[int, int]:
    """Bytes of this rank's shards, and of the whole model."""
    with zero.Init(**ways):
        model = make_net(blocks=4, width=32)
    mine = sum(owner_of(param).unit.shard.values.untyped_storage().nbytes() for param in model.parameters())
    whole = sum(param.numel() * param.element_size() for param in model.parameters())
    alive = sum(param.untyped_storage().nbytes() for param in model.parameters() if not is_released(param))
    return mine + alive, whole


def test_a_rank_holds_its_shard_only(pool):
    for mine, whole in pool.run(4, held_after, {}):
        assert whole / 4 <= mine <= 1.1 * whole / 4 + 26 * 64  # 26 parameters, each padded to a line
    for mine, _ in pool.run(4, held_after, {"remote_device": "cpu", "pin_memory": True}):
        assert mine <= 1.1 * whole / 4 + 26 * 64


@pytest.mark.parametrize("stage", [1, 3])
def test_the_configuration_of_the_launcher_counts(stage):
    """A model is cut where `zero run` got stage 3, and the script says none."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(SETS, f'["zero_optimization.stage={stage}", "train_micro_batch_size_per_gpu=1"]')
        with zero.Init():
            model = make_net()
    assert {is_released(param) for param in model.parameters()} == {stage == 3}


def mixed() -> nn.Module:
    """Parts are plain, parts from one block or another."""
    with zero.Init():
        half = Net()
    plain = make_net()
    with zero.GatheredParameters(half.parameters(), modifier_rank=0):
        half.load_state_dict(plain.state_dict())
    half.head, half.blocks[1] = plain.head, plain.blocks[1]
    half.blocks[0].down = plain.blocks[0].down
    zero.Init(module=half.blocks[0].down)
    return half


def test_initialize_takes_over_built_and_mixed_models():
    """Three steps give the bits of a plain start; also where `initialize` stands in the block that builds."""
    for stage in (1, 3):
        json = {"stage": stage, "precision": "bf16" if stage == 3 else "fp32"}
        plain, built, half = (run(Model(make), json) for make in (make_net, built_net, mixed))
        with zero.Init():
            inside = run("net", json)
        assert all(same(each, plain) for each in (built, half, inside)), f"stage {stage}"


def built_net() -> nn.Module:
    with zero.Init():
        return make_net()


def test_the_configuration_and_enabled_say_whether_it_cuts():
    def cut(**ways: Any) -> bool:
        with zero.Init(**ways):
            model = make_net()
        (found,) = {is_released(param) for param in model.parameters()}
        return found

    assert not cut(enabled=False)
    auto = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}
    for stage in range(4):
        assert cut(config_dict_or_path={**auto, "zero_optimization": {"stage": stage}}) == (stage == 3)
    assert cut(config={"zero_optimization": {"stage": 3}, "train_batch_size": 4})


def test_a_module_that_is_there_is_cut_where_it_stands_and_blocks_nest():
    plain, whole = make_net(), make_net()
    assert isinstance(zero.Init(module=whole), zero.Init)
    assert all(map(is_released, whole.parameters())) and not differing(whole, plain) and hooks() == 0
    zero.Init(module=whole)  # of which all is cut already
    whole.extra = nn.Linear(2, 2)
    zero.Init(module=whole)  # and of which a part is
    assert all(map(is_released, whole.parameters()))
    with zero.Init():
        with zero.Init(enabled=False), zero.Init(dtype=torch.float16):
            inner = make_net()
        assert hooks() == 2
        outer = make_net()
        zero.Init(module=(late := make_net()))
    assert hooks() == 0
    assert [differing(each, plain) for each in (inner, outer, late)] == [""] * 3


@pytest.mark.ranks(0)
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


READERS = {
    "pickle": pickle.dumps,
    "save": lambda model: torch.save(model, io.BytesIO()),
    "forward": lambda model: model(*batch(0, 2)),
    "initialise": lambda model: nn.init.zeros_(model.head.weight),
}


def test_reading_outside_raises_with_the_full_name():
    with zero.Init():
        model = make_net()
    for name, reader in READERS.items():
        which = "head.weight" if name == "initialise" else "embed.weight"
        said = f"RuntimeError: parameter '{which}' is released; read it inside zero.GatheredParameters(...)"
        assert said_by(lambda: reader(model)).startswith(said), name  # noqa: B023
    engine, *_ = zero.initialize(model=make_net(), config=config(3, 2))
    said = said_by(lambda: zero.Init(module=engine.module))
    assert said.startswith("ValueError: Init(module=...): parameter 'embed.weight' belongs to")
    engine.destroy()


CASTS = {
    "no-op": lambda model: model.to("cpu").float().cpu(),
    "half": lambda model: model.half(),
    "one module": lambda model: (model, model.head.bfloat16())[0],
    "from outside": lambda model: nn.Sequential(model, nn.Linear(2, 2)).to(torch.float16)[0],
    "a copy": lambda model: copy.deepcopy(model).to("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("way", CASTS)
def test_a_built_model_is_moved_and_cast_as_a_plain_one(way):
    """Nothing is gathered for it; a part that is plain goes along, and what comes in by `initialize` is the same."""
    plain, cut = make_net(), built_net()
    for model in (plain, cut):
        model.blocks[0].register_parameter("scale", nn.Parameter(torch.ones(3)))
        model.register_buffer("seen", torch.ones(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero.core.comm, "gather", None)
        cut, plain = CASTS[way](cut), CASTS[way](plain)
    assert [name for name, param in cut.named_parameters() if not is_released(param)] == ["blocks.0.scale"]
    assert not differing(cut, plain)
    built = (lambda: CASTS[way](make_net())), (lambda: CASTS[way](built_net()))
    found = [run(Model(make), {"stage": 3, "precision": "bf16"}) for make in built]
    assert same(*found)


def test_a_gathered_model_is_not_cast():
    model = built_net()
    with zero.GatheredParameters(model.parameters()):
        model.float()
        assert "asked for torch.float16" in said_by(model.half)
    assert not differing(model, make_net())


class Mask(nn.Module):
    """As Wav2Vec2's: torch's old constructor pays no heed to a device that a context sets."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.Tensor(8).fill_(3.0))
        self.up = nn.Linear(8, 8)


def test_a_device_context_is_for_the_models_own_tensors():
    with zero.Init(), torch.device("meta"):
        model = nn.Sequential(Mask(), Mask())
    assert [name for name, param in model.named_parameters() if is_released(param)] == ["0.mask", "1.mask"]
    assert all(param.is_meta for name, param in model.named_parameters() if "up" in name)
    with zero.GatheredParameters([each.mask for each in model]):
        assert all(each.mask.eq(3).all() for each in model)


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
    assert not differing(model, make_net())


def attach(model: nn.Module) -> nn.Parameter:
    """Put a layer behind one of the model's; its weight."""
    torch.manual_seed(3)
    model.blocks[0].up = nn.Sequential(model.blocks[0].up, nn.Linear(25, 25))
    return model.blocks[0].up[1].weight


def test_a_module_attached_later_runs_and_stays_as_it_is():
    engine, *_ = zero.initialize(model=built_net(), config=config(3, 2))
    added = attach(engine.module)
    before, losses = added.detach().clone(), []
    for index in range(3):
        loss = engine(*batch(index, 4))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert torch.equal(added, before)
    assert len(set(losses)) == 3
    everyones: list[Any] = [None] * 2
    dist.all_gather_object(everyones, losses)
    assert everyones == [losses] * 2
    engine.destroy()


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


def test_a_copy_is_cut_in_the_same_way():
    """Nothing is sent for it, what is tied stays tied, and its values are its own."""
    with zero.Init():
        model = build("tied").requires_grad_(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero.core.comm, "gather", None)
        copied = copy.deepcopy(model)
    assert all(is_released(param) for param in copied.parameters())
    assert not differing(copied, model)
    with zero.GatheredParameters(copied.parameters(), modifier_rank=0):
        copied.embed.weight.fill_(1)
    assert not differing(model, build("tied").requires_grad_(False))
    assert values(copied)["head.weight"].eq(1).all()


def change(model: nn.Module) -> nn.Module:
    """What scripts do to a model before they train it: another head, a larger embedding, a norm of a weight."""
    model.head = copy.deepcopy(model.head)
    model.embed.weight.data = torch.cat([model.embed.weight.data, torch.randn(3, WIDTH)])
    scale = nn.Parameter(model.blocks[0].up.weight.norm(dim=1))
    model.blocks[0].register_parameter("scale", scale)
    model.blocks[1].up.weight.data.mul_(2)
    return model.requires_grad_(False)


def test_a_later_block_changes_a_model_as_plain_torch_does():
    wanted = make_net()
    torch.manual_seed(3)
    change(wanted)
    with zero.Init():
        model = make_net()
    torch.manual_seed(3)
    with zero.Init(dtype=torch.bfloat16):
        change(model)
    assert all(is_released(param) for param in model.parameters())
    read = {"blocks.0.up.weight", "blocks.0.scale", "blocks.1.up.weight", "head.weight", "head.bias", "embed.weight"}
    found = values(model)
    for name, value in values(wanted).items():
        assert found[name].equal(value.to(found[name].dtype)), name
        assert (found[name].dtype == torch.bfloat16) == (name in read), name


def test_parameters_that_are_put_in_place_of_empty_ones_are_cut():
    """As Diffusers loads by default: Accelerate makes each parameter anew, on meta, from its attributes."""
    accelerate = pytest.importorskip("accelerate")
    wanted = make_net()
    with zero.Init():
        with accelerate.init_empty_weights():
            model = make_net()
        for (name, param), value in zip(list(model.named_parameters()), wanted.parameters(), strict=True):
            assert param.is_meta
            path, _, name = name.rpartition(".")
            model.get_submodule(path)._parameters[name] = nn.Parameter(value.detach().clone())  # registers nothing
    assert all(is_released(param) for param in model.parameters())
    assert not differing(model, wanted)
