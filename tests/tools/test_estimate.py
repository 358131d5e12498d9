"""The promise: what `zero.estimate` says before the start is what an engine then reports, kind by kind and to the byte.

And the most that is alive while gradients travel, by the storages of all tensors, within 3 %.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import Net, config, share
from test_init_memory import Peak

import zero
from zero.__main__ import main
from zero.sizes.choice import CHOICES, StageChoice
from zero.sizes.estimate import DeviceBytes, Estimate, estimate
from zero.sizes.shape import shape_of

SHAPE = {"blocks": 6, "width": 48}  # two matrices of a block have enough elements for moments in fewer bits
BF16 = {"bf16": {"enabled": True}}
CPU, FILE = {"device": "cpu"}, {"device": "nvme", "nvme_path": "FOLDER"}
SUMS = {"grad_accum_dtype": "bf16"}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}
LION = {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}


def adam(**states: str) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "zero": states}}}


def case(stage: int, world: int = 2, accumulation: int = 1, section: dict[str, Any] | None = None, **more: Any) -> Any:
    settings = config(stage, world, accumulation=accumulation, **more)
    settings["zero_optimization"] |= section or {}
    return world, settings


CASES = [
    case(1, accumulation=2, **BF16),
    case(3, section={"stage3_prefetch_bucket_size": 10_000}, **BF16, **adam(moments="8bit")),
    case(3, section={"offload_optimizer": FILE, "offload_param": FILE | {"max_in_cpu": 30_000}}, **BF16),
    *longer(
        case(1, **BF16, **MUON),
        case(0),
        case(0, accumulation=2, **MUON),
        case(3, section={"offload_optimizer": CPU | {"ratio": 0.5}}, **BF16, **MUON),
        case(2, 3, **BF16, optimizer={"type": "Muon", "params": {"lr": 1e-3, "zero": {"moments": "8bit"}}}),
        case(0, accumulation=2, **BF16, **adam(master="fp32")),
        case(1, 3, **LION),
        case(2, 3, accumulation=2, fp16={"enabled": True}),
        case(2, section={"offload_optimizer": CPU | {"ratio": 0.5}}, **BF16, **adam(moments="bf16")),
        case(3, section={"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 30_000}),
        case(3, section={"stage3_param_persistence_threshold": 10_000}, data_types=SUMS, **BF16),
        case(3, 4, zero={"shard_size": 2}, **BF16),
        case(3, 4, section={"zero_hpz_partition_size": 2}),
        case(3, section={"offload_optimizer": CPU, "offload_param": CPU}),
        case(3, 1, section={"offload_param": CPU}, **BF16),
    ),
]


def reported(settings: dict[str, Any]) -> tuple[Any, DeviceBytes, Any]:
    """What the engine says of this rank: at rest, at its peaks during the third step, and off the device."""
    engine, *_ = zero.initialize(model=Net(**SHAPE), config=settings)
    rest, whole, gradients = engine.state_nbytes(), [], []
    for module in engine.module.modules():
        module.register_forward_pre_hook(lambda *_: whole.append(engine.state_nbytes().parameters))
    for param in engine.module.parameters():
        param.register_post_accumulate_grad_hook(lambda _: whole.append(engine.state_nbytes().parameters))
    for step in range(3 * settings["gradient_accumulation_steps"]):
        loss = engine(*share(step))
        engine.backward(loss)
        gradients.append(engine.state_nbytes().gradients)
        engine.step()
    found = rest.parameters, max(gradients), rest.optimizer, max(whole) - rest.parameters
    host = engine.host_nbytes()
    engine.destroy()
    return found, host


@pytest.mark.parametrize(("world", "settings"), CASES)
def test_the_engine_reports_what_was_estimated(pool, tmp_path, world, settings):
    for section in settings["zero_optimization"].values():
        if isinstance(section, dict) and "nvme_path" in section:
            section["nvme_path"] = str(tmp_path)
    with torch.device("meta"):
        model = Net(**SHAPE)
    row = estimate(model, settings, world, device="cpu").configured
    device = row.device
    wanted = device.parameters, device.gradients, device.masters + device.moments, device.gathered
    assert sum(wanted) > 0
    for rank, (found, host) in enumerate(pool.run(world, reported, settings)):
        if rank == 0 or settings["optimizer"]["params"].get("zero", {}).get("moments", "fp32") == "fp32":
            assert found == wanted
            assert host is None or host == row.host
    assert (row.host.memory + row.host.files > 0) == (host is not None)


def many_layers() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(128, 128, bias=False) for _ in range(40)))


def most_alive(settings: dict[str, Any]) -> int:
    """The growth of all tensors' storages by one step, of which activations are next to nothing."""
    engine, *_ = zero.initialize(model=many_layers(), config=settings)
    dtype = next(engine.parameters()).dtype

    def step() -> None:
        engine.backward(engine(torch.ones(1, 128, dtype=dtype)).sum())
        engine.step()

    step()
    with Peak(128 * 128) as peak:
        step()
    gc.unfreeze()
    engine.destroy()
    return peak.growth


@pytest.mark.parametrize("bf16", [False, *longer(True)])
def test_gradients_and_what_is_on_its_way_are_what_is_alive(pool, bf16):
    world, settings = case(2, bf16={"enabled": bf16})
    with torch.device("meta"):
        model = many_layers()
    device = estimate(model, settings, world, device="cpu").configured.device
    assert device.gathered == 0 < device.reduction
    for growth in pool.run(world, most_alive, settings):
        assert growth == pytest.approx(device.gradients + device.reduction, rel=0.03)


# By number of parameters.


def test_a_transformer_has_the_parameters_that_were_asked_for() -> None:
    for numel in (1e6, 1e9, 7e9, 70e9, 1e12):
        shape = shape_of(numel)
        given = shape_of(numel, layers=shape.layers + 1, width=shape.width // 2)
        assert (given.layers, given.width) == (shape.layers + 1, shape.width // 2)
        assert [given.numel, shape.numel] == pytest.approx([numel, numel], rel=1e-3)
        assert f"{shape.numel:,} parameters" in str(shape)


def test_every_choice_has_a_row_and_the_one_of_the_configuration_is_marked() -> None:
    settings = config(2, 4, zero_optimization={"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}})
    found = zero.estimate(1e9, settings, 4)
    assert [row.choice for row in found.rows] == [*CHOICES, StageChoice(1, "nvme")]
    assert found.configured is found.rows[-1] and found.configured.host.files > 0
    marked = [line for line in str(found).splitlines() if line.startswith("* ")]
    assert len({line.partition("  ")[0] for line in marked}) == 1 and marked[0].startswith("* 1, optimizer on drive")


def test_what_was_assumed_is_said() -> None:
    sgd = config(1, 2, optimizer={"type": "RMSprop", "params": {}})
    auto = config(2, 2, zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": "auto"}})
    none = {key: value for key, value in config(1, 2).items() if key != "optimizer"}
    said = [" ".join(str(zero.estimate(1e6, settings, 2)).split()) for settings in (sgd, auto, none)]
    wanted = ["RMSprop runs as torch's own class", "'auto' looks at", "names no optimizer"]
    assert [text for line, text in zip(said, wanted, strict=True) if text not in line] == []


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture, tmp_path: Any) -> None:
    path = tmp_path / "zero.json"
    path.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 3}}')
    words = ["--params", "1e8", "--world", "8", "--config", str(path), "--layers", "10", "--width", "512"]
    assert main(["plan", *words, "--device", "cpu"]) == 0
    found = zero.estimate(1e8, path, 8, device="cpu", layers=10, width=512)
    assert isinstance(found, Estimate)
    assert capsys.readouterr().out == f"{found}\n"


REFUSED = {
    "--params 5": "number of parameters: got 5, wanted at least 1000",
    "--params 1e9 --layers 99 --width 8192": "give fewer layers, or a smaller width",
    "--params 1e9 --groups": "one of them at a time",
    "--params 1e9 --tp 2": "of a number of parameters no layers are known; give a model",
    "--params 1e9 --config no.json": "there is no file 'no.json'",
    "": "add --params N",
}


def test_what_cannot_be_planned_is_said(capsys: pytest.CaptureFixture) -> None:
    for words, text in REFUSED.items():
        assert main(["plan", "--world", "4", *words.split()]) == 2
        said = capsys.readouterr()
        assert text in said.err and not said.out
    with pytest.raises(ValueError, match="device: got 'tpu', wanted 'cuda' or 'cpu'"):
        zero.estimate(1e9, None, 2, device="tpu")
    with pytest.raises(ValueError, match="model: got a str, wanted a torch"):
        zero.estimate("gpt", None, 2)
    assert not dist.is_initialized()
