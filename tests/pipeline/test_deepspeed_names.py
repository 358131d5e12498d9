"""The promise: a model that is written as DeepSpeed's list of layers trains over stages to the bits of one process."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from marks import longer
from pipelines import CLASSES, ROWS, WIDTH, Found, batches, compare, json_of, pipelined
from states import state_of
from torch import nn

import zero
from zero.parallel.pipeline.topology import PipeDataParallelTopology, ProcessTopology

MICRO_BATCHES = 4
SHORT = [(0, "step", 2), (1, "use", 0), (3, "step", 0), (3, "use", 2)]
LONG = [each for each in itertools.product((0, 1, 3), ("step", "use"), (0, 2)) if each not in SHORT]
TIED = [each for each in itertools.product(range(4), ("step", "use")) if each not in ((2, "step"), (3, "use"))]


class Twice(nn.Module):
    """Takes a tuple and returns one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x = x[0] + x[1] if isinstance(x, tuple) else x
        return self.dropout(torch.tanh(self.linear(x))), x


def transposed(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Computes with the transposed weight of the first layer."""
    return F.linear(x, module.weight.t())


def kinds_of_layers(tied: bool) -> list[Any]:
    torch.manual_seed(5)
    first = zero.LayerSpec(nn.Linear, WIDTH, WIDTH)
    last = zero.LayerSpec(nn.Tanh)
    if tied:
        first = zero.TiedLayerSpec("in", nn.Linear, WIDTH, WIDTH)
        last = zero.TiedLayerSpec("in", nn.Linear, WIDTH, WIDTH, forward_fn=transposed, tied_weight_attr=["weight"])
    return [
        first,
        zero.LayerSpec(Twice, WIDTH),
        Twice(WIDTH),
        lambda pair: pair[0] * pair[1],
        nn.Sequential(),
        torch.relu,
        zero.LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False),
        last,
        nn.Linear(WIDTH, CLASSES),
    ]


def names(engine: Any) -> list[str]:
    return [name for name, _ in engine.module.named_parameters()]


def trained(json: dict[str, Any], stages: int | None, tied: bool = False, watch: Any = names) -> Found:
    """With these layers, all of whose random numbers come from their numbers."""
    zero.init_distributed()

    def make() -> nn.Module:
        return zero.PipelineModule(kinds_of_layers(tied), stages, loss_fn=F.cross_entropy, seed_layers=True)

    return pipelined(json, make, loss_fn=None, watch=watch)


@pytest.mark.parametrize(("stage", "gather", "interval"), [*SHORT, *longer(*LONG)])
def test_layers_of_all_kinds_train_as_in_one_process(pool: Any, stage, gather, interval):
    section = {"gather": gather, "activation_checkpoint_interval": interval}
    alike = stage if gather == "use" else min(stage, 1)
    one = pool.run(1, trained, json_of(alike, 1, MICRO_BATCHES), 1)
    two = pool.run(2, trained, json_of(stage, 1, MICRO_BATCHES, pipeline=section), 2)
    compare(two, one[0])
    assert [each.seen for each in two] == [
        ["0.weight", "0.bias", "1.linear.weight", "1.linear.bias"],
        ["2.linear.weight", "2.linear.bias", "6.weight", "8.weight", "8.bias"],
    ]


@pytest.mark.parametrize(("stage", "gather"), [(2, "step"), (3, "use"), *longer(*TIED)])
def test_a_tied_layer_is_one_module_on_all_its_stages(pool: Any, stage, gather):
    one = pool.run(1, trained, json_of(0, 1, MICRO_BATCHES), 1, True)[0]
    two = pool.run(2, trained, json_of(stage, 1, MICRO_BATCHES, pipeline={"gather": gather}), 2, True)
    for each in two:  # gradients of two places are added in another order
        torch.testing.assert_close([each.losses, each.norms], [one.losses, one.norms], rtol=1e-6, atol=1e-7)
        assert each.seen[:2] == ["tied_modules.in.weight", "tied_modules.in.bias"]
        for name, value in each.state.items():
            torch.testing.assert_close(value, one.state[name], rtol=1e-3, atol=1e-6)
    assert torch.equal(two[0].state["tied_modules.in.weight"], two[1].state["tied_modules.in.weight"])


@pytest.mark.parametrize("stage", [3, *longer(1)])
def test_replicas_of_stages_train_as_those_of_one_stage(pool: Any, stage):
    compare(
        pool.run(4, trained, json_of(stage, 2, MICRO_BATCHES), 2),
        pool.run(2, trained, json_of(1, 2, MICRO_BATCHES), 1)[0],
    )


def checkpointed(json: dict[str, Any], stages: int, folder: Path, load: bool) -> dict[str, torch.Tensor]:
    zero.init_distributed()
    model = zero.PipelineModule(kinds_of_layers(True), stages, loss_fn=F.cross_entropy)
    engine = zero.initialize(model=model, config=json)[0]
    if load:
        engine.load_checkpoint(folder)
    else:
        engine.train_batch(batches(0))
        engine.save_checkpoint(folder)
    found = state_of(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [3, *longer(0)])
def test_a_checkpoint_of_stages_is_one_of_the_whole_model(pool: Any, tmp_path: Path, stage):
    json = json_of(stage, 1, MICRO_BATCHES)
    two = pool.run(2, checkpointed, json, 2, tmp_path, False)
    one = pool.run(1, checkpointed, json, 1, tmp_path, True)[0]
    assert {name for each in two for name in each} == one.keys()
    for each in two:
        assert [name for name, value in each.items() if not torch.equal(value, one[name])] == []


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_the_json_divides_layers_that_nothing_else_has_divided(pool: Any, schedule):
    section = {"stages": 2, "schedule": schedule, "partition": "uniform"}
    one = pool.run(1, trained, json_of(0, 1, MICRO_BATCHES), None)
    two = pool.run(2, trained, json_of(1, 1, MICRO_BATCHES, pipeline=section), None)
    compare(two, one[0])


class Grown(zero.PipelineModule):
    """As GPT-NeoX does: attributes first, and the constructor of the class above a second time, with one more layer."""

    def __init__(self, stages: int) -> None:
        self.specs = kinds_of_layers(False)
        self.how = {
            "num_stages": stages,
            "loss_fn": F.cross_entropy,
            "seed_layers": True,
            "partition_method": "type:linear",
        }
        super().__init__(layers=self.specs, **self.how)
        self.specs.append(lambda x: 2 * x)
        super().__init__(layers=self.specs, **self.how)


def grown(json: dict[str, Any], stages: int) -> Found:
    zero.init_distributed()
    return pipelined(json, lambda: Grown(stages), loss_fn=None, watch=lambda engine: len(engine.module.forward_funcs))


def test_a_subclass_may_be_built_twice(pool: Any):
    one = pool.run(1, grown, json_of(0, 1, MICRO_BATCHES), 1)
    two = pool.run(2, grown, json_of(0, 1, MICRO_BATCHES), 2)
    compare(two, one[0])
    assert [each.seen for each in two] == [6, 4]


def answers(json: dict[str, Any]) -> list[Any]:
    """What the engine says, by DeepSpeed's names."""
    zero.init_distributed()
    model = zero.PipelineModule(kinds_of_layers(False), topology=PipeDataParallelTopology(2, 1))
    engine = zero.initialize(model=model, config=json, loss_fn=F.cross_entropy)[0]
    said: list[Any] = [engine.is_first_stage, engine.is_last_stage(), bool(engine.is_last_stage), engine.stage_id]
    said += [engine.num_stages, engine.micro_batches, engine.grid.stage_to_global(1), engine.get_additional_losses()]
    engine.set_has_attention_mask(True)
    engine.reset_activation_shape()
    engine.set_batch_fn(lambda batch: (batch[0], batch[1] * 0))
    engine.set_dataloader([next(batches(0))])
    zeros = engine.eval_batch()
    engine.set_batch_fn(None)
    engine.set_dataiterator(iter([(x, y * 0) for x, y in [next(batches(0))] * MICRO_BATCHES]))
    said.append(bool(torch.equal(zeros, engine.eval_batch())))
    engine.set_train_batch_size(2 * ROWS)
    engine.train_batch(batches(0))
    said.append(engine.micro_batches)
    for method in (engine, engine.backward, engine.step):
        with pytest.raises(RuntimeError, match=r"of a model whose stages lie on several ranks"):
            method(*([] if method == engine.step else [torch.ones((), requires_grad=True)]))
    with pytest.raises(AttributeError, match=r"'_INSTRUCTION_MAP', which is DeepSpeed's; instead: `pipeline.schedule`"):
        engine._INSTRUCTION_MAP  # noqa: B018
    engine.destroy()
    return said


def test_the_engine_answers_by_the_names_of_theirs(pool: Any):
    first, last = pool.run(2, answers, json_of(1, 1, MICRO_BATCHES))
    assert first == [1, False, False, 0, 2, MICRO_BATCHES, 1, None, True, 2]
    assert last == [0, True, True, 1, 2, MICRO_BATCHES, 1, None, True, 2]


def imported(json: dict[str, Any], folder: Path, stages: int) -> dict[str, torch.Tensor]:
    zero.init_distributed()
    model = zero.PipelineModule(kinds_of_layers(True), stages, loss_fn=F.cross_entropy)
    engine = zero.initialize(model=model, config=json)[0]
    assert zero.load_weights(engine, folder) == ([], [])
    found = state_of(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [3, *longer(0)])
def test_the_files_of_layers_are_read(pool: Any, tmp_path: Path, stage):
    whole = zero.PipelineModule(kinds_of_layers(True))
    for number, layer in enumerate(whole._module(number) for number in range(len(whole._stage_of))):
        if layer is not None and layer.state_dict():
            weights = {name: torch.randn_like(value) for name, value in layer.state_dict().items()}
            layer.load_state_dict(weights)
            torch.save(layer.state_dict(), tmp_path / f"layer_{number:02d}-model_00-model_states.pt")
    torch.save(whole._module(0).state_dict(), tmp_path / "layer_00-model_00-model_states.pt")  # as the last tied one
    for ranks in (1, 2):
        for each in pool.run(ranks, imported, json_of(stage, 1, MICRO_BATCHES), tmp_path, ranks):
            for name, value in each.items():
                if not name.startswith("exp_avg"):
                    assert torch.equal(value, whole.state_dict()[name])
    (tmp_path / "layer_00-model_00-model_states.pt").rename(tmp_path / "layer_00-model_01-model_states.pt")
    with pytest.raises(
        ValueError, match=r"layer_00-model_01-model_states.pt: layers that are cut are not put together"
    ):
        zero.load_weights(whole, tmp_path)


MISTAKES = {
    "two stages share": (lambda one: {"layers": [one, nn.Tanh(), nn.Tanh(), one]}, "layers 0 and 3 share a parameter"),
    "loss": (lambda one: {"layers": [one, nn.Tanh()], "loss_fn": one}, "make it the last layer"),
    "way": (
        lambda one: {"layers": [one, nn.Tanh()], "partition_method": "profile"},
        "got 'profile'; wanted 'parameters'",
    ),
    "few layers": (lambda one: {"layers": [one]}, "1 layers are fewer than the 2 stages"),
    "no layer": (lambda one: {"layers": [one, 5]}, "layer 1 is of int; wanted what can be called"),
    "ranks": (
        lambda one: {"layers": [one, nn.Tanh()], "topology": PipeDataParallelTopology(2, 2)},
        "got 2 stages of 4 ranks; wanted a multiple, and there are 2",
    ),
    "stages": (
        lambda one: {"layers": [one, nn.Tanh()], "num_stages": 3},
        "got 3 stages of 2 ranks; wanted a multiple, and there are 2",
    ),
}


def refused() -> dict[str, str]:
    zero.init_distributed()
    found = {}
    for name, (make, _) in MISTAKES.items():
        try:
            zero.PipelineModule(**{"num_stages": 2, **make(nn.Linear(2, 2))})
        except (ValueError, TypeError) as error:
            found[name] = str(error)
    return found


def in_another_order() -> None:
    with pytest.raises(ValueError, match="pipe must be its first axis"):
        zero.PipelineModule([nn.Tanh(), nn.Tanh()], topology=ProcessTopology(["data", "pipe"], [2, 2]))
    with zero.Init(), pytest.raises(ValueError, match=r"inside zero.Init: a rank builds its own layers only"):
        zero.PipelineModule([nn.Tanh(), nn.Tanh()], 2)


def of_two_minds(json: dict[str, Any]) -> list[str]:
    """What initialize says to arguments and keys that contradict a PipelineModule of two stages."""
    zero.init_distributed()
    said = []
    ways = (
        {"config": json | {"pipeline": {"stages": 1, "schedule": "zbv"}}},
        {"config": json | {"pipeline": {"partition": "uniform"}}},
        {"config": json | {"pipeline": {"stage_map": {"0": 1}}}},
        {"config": json, "mesh_param": {"dp_shard": 2}},
        {"config": json | {"pipeline": {"activation_checkpoint_interval": 1}}, "model": nn.Linear(2, 2)},
    )
    for way in ways:
        with pytest.raises(ValueError) as refusal:
            zero.initialize(**{"model": zero.PipelineModule(kinds_of_layers(False), 2), **way})
        said.append(str(refusal.value))
    return said


def test_what_is_wrong_is_said(pool: Any):
    made, by, mapped, mesh, plain = pool.run(2, of_two_minds, json_of(0, 1, MICRO_BATCHES))[0]
    assert "made with 2 stages by 'parameters', and the JSON wants 4 by 'parameters'; leave num_stages" in made
    assert "made with 2 stages by 'parameters', and the JSON wants 2 by 'uniform'" in by
    assert "pipeline.stage_map: not for a PipelineModule" in mapped
    assert "got mesh_param, and a PipelineModule that says the ranks of its stages; keep one" in mesh
    assert "pipeline.activation_checkpoint_interval: is for a PipelineModule; set zero.recompute" in plain
    pool.run(4, in_another_order)
    said = pool.run(2, refused)[1]
    for name, (_, text) in MISTAKES.items():
        assert text in said.get(name, ""), (name, said)
