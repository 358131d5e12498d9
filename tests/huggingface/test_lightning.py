"""The promise: `Trainer(strategy=ZeroStrategy(...))` trains as with Lightning's own DDPStrategy, on every stage."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import needs
from torch import nn

pytestmark = needs("lightning")

EVERY = {"zero": {"reduce_every_micro_batch": True}}
TRAINERS = {
    "plain": {},
    "a short window": {"accumulate_grad_batches": 3},
    "clipped": {"gradient_clip_val": 0.5},
}


def losses(strategies: list[Any]) -> list[dict[str, list[float]]]:
    """Of two epochs with each of TRAINERS, then the metric of the last validation and the number of steps."""
    from lightning_runs import data, seeded, trainer

    from zero.lightning import ZeroStrategy

    found = []
    for strategy in strategies:
        runs = {}
        for name, options in TRAINERS.items():
            config = {"zero_optimization": {"stage": strategy}, **EVERY}
            run = trainer(ZeroStrategy(config=config) if isinstance(strategy, int) else strategy, **options)
            net = seeded()
            run.fit(net, data(), data())
            runs[name] = [*net.losses, run.callback_metrics["val"].item(), run.global_step]
        found.append(runs)
    return found


def test_losses_are_those_of_ddp(pool: Any, stages: list[int]) -> None:
    (ddp, *ours), _ = pool.run(2, losses, ["ddp", *stages])
    assert len(set(ddp["plain"])) == len(ddp["plain"]) == 10
    assert ddp["plain"] != ddp["clipped"]
    for runs in ours:
        assert runs["plain"] == ddp["plain"], "the order of sums is the same, so the bits are"
        for name, values in runs.items():
            assert values == ours[0][name], "the stages differ"
            assert values == pytest.approx(ddp[name], rel=2e-6, abs=0), name


def by_hand() -> tuple[list[list[float]], list[float]]:
    """The same training with manual optimization, accumulation and clipping in `training_step`; and automatically."""
    from lightning_runs import Net, data, seeded, trainer

    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            optimizer, loss = self.optimizers(), super().training_step(batch, index)
            self.manual_backward(loss / 2)
            if index % 2:
                self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()
                self.lr_schedulers().step()

    found = []
    for strategy in (3, "ddp"):
        net = Manual()
        trainer(strategy).fit(net, data())
        found.append(net.losses)
    net = seeded()
    trainer(3, accumulate_grad_batches=2, gradient_clip_val=0.5).fit(net, data())
    return found, net.losses


def test_manual_optimization_steps_with_the_engine(pool: Any) -> None:
    (ours, ddp), automatic = pool.run(2, by_hand)[0]
    assert ours == pytest.approx(ddp, rel=2e-6, abs=0)
    assert ours == pytest.approx(automatic, rel=2e-6, abs=0)


def precisions(stages: list[int], names: list[str]) -> dict[str, Any]:
    """For each precision of Trainer: losses, dtypes of parameters and of what a step makes, loss scale."""
    from lightning.pytorch.plugins import MixedPrecision
    from lightning_runs import Net, data, trainer

    from zero.lightning import ZeroStrategy

    class Typed(Net):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = super().training_step(batch, index)
            self.returns = str(self(batch[0]).dtype), str(torch.zeros(1).dtype)
            return loss

    found = {}
    # On the CPU Trainer makes bf16 of precision="16-mixed", but takes the plugin.
    for name in names:
        runs = []
        for stage in stages:
            plugin = {"plugins": MixedPrecision(name, "cpu")} if name == "16-mixed" else {"precision": name}
            net, run = Typed(), trainer(ZeroStrategy(stage, {"fp16": {"initial_scale_power": 8}}), **plugin)
            run.fit(net, data(), data())
            engine = run.strategy.engine
            assert run.precision == name
            runs.append((net.losses, str(net.head.weight.dtype), *net.returns, engine.optimizer.loss_scale))
        assert all(run == runs[0] for run in runs), "the stages differ"
        found[name] = runs[0]
    return found


PRECISIONS = {
    "32-true": ("torch.float32", "torch.float32", "torch.float32", 1.0),
    "16-mixed": ("torch.float32", "torch.float16", "torch.float32", 2.0**8),
    "bf16-true": ("torch.bfloat16", "torch.bfloat16", "torch.bfloat16", 1.0),
    "bf16-mixed": ("torch.float32", "torch.bfloat16", "torch.float32", 1.0),
    "16-true": ("torch.float16", "torch.float16", "torch.float16", 2.0**8),
}


@pytest.mark.long
def test_precision_is_that_of_the_engine(pool: Any) -> None:
    found = pool.run(2, precisions, [3], list(PRECISIONS))[0]
    exact = found["32-true"][0]
    for name, (values, *kinds) in found.items():
        assert tuple(kinds) == PRECISIONS[name], name
        assert values == pytest.approx(exact, rel=0.05), name
        assert (values == exact) == (name == "32-true")


def sections(folder: str) -> list[list[float]]:
    """Losses with optimizer and schedule of a file, and of `configure_optimizers`; at stages 3 and 1."""
    from lightning_runs import data, seeded, trainer

    from zero.lightning import ZeroStrategy

    path = f"{folder}/zero.json"
    if dist.get_rank() == 0:
        optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2}}
        schedule = {"type": "CosineAnnealingLR", "params": {"T_max": 12}}
        section = {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5, "gradient_accumulation_steps": "auto"}
        with open(path, "w") as file:
            json.dump({"optimizer": optimizer, "scheduler": schedule, **section}, file)
    dist.barrier()
    found = []
    for strategy, options in ((ZeroStrategy(config=path), {}), ("zero_stage_3", {"gradient_clip_val": 0.5})):
        net, run = seeded(), trainer(strategy, accumulate_grad_batches=2, **options)
        run.fit(net, data())
        found.append([*net.losses, run.lr_scheduler_configs[0].scheduler.get_last_lr()[0]])
    return found


def test_a_config_gives_optimizer_and_schedule(pool: Any, tmp_path: Any) -> None:
    of_file, of_module = pool.run(2, sections, str(tmp_path))[0]
    assert of_file == pytest.approx(of_module, rel=2e-6, abs=0)


def late() -> tuple[list[float], list[float], bool]:
    """A model that is built in `configure_model`, at stage 3, and one that was whole before; whether it came cut."""
    from lightning_runs import Net, data, seeded, trainer

    cut = []

    class Late(Net):
        def configure_optimizers(self) -> Any:
            cut.append(all("Released" in type(param).__name__ for param in self.parameters()))
            return super().configure_optimizers()

    torch.manual_seed(1)
    nets = Late(late=True), seeded()
    for net in nets:
        trainer(3).fit(net, data())
    return nets[0].losses, nets[1].losses, cut == [True]


def of_batch_norm() -> bool:
    """BatchNorm in bf16-true, as under Lightning's own half precision, and a parameter that is not trained."""
    from lightning_runs import WIDTH, Net, data, trainer

    net = Net()
    net.blocks.append(nn.BatchNorm1d(WIDTH))
    net.blocks[0].requires_grad_(False)
    net.make = lambda params: torch.optim.SGD([param for param in params if param.requires_grad], lr=0.1)
    before = net.blocks[0][0].weight.detach().clone()
    trainer(2, precision="bf16-true").fit(net, data(), data())
    return torch.equal(net.blocks[0][0].weight, before.bfloat16()) and net.losses[-1] < net.losses[0]


def test_configure_model_builds_in_pieces_and_buffers_and_frozen_parameters_are_taken(pool: Any) -> None:
    for built_late, whole, cut in pool.run(2, late):
        assert built_late == whole
        assert cut
    assert pool.run(2, of_batch_norm) == [True, True]


def in_turn() -> list[Any]:
    """Validate, fit, fit again, test, predict and train by another Trainer, with one model; the same under DDP."""
    from lightning_runs import data, seeded, trainer, weights

    found = []
    for strategy in (3, "ddp"):
        net, run = seeded(), trainer(strategy)
        values = [run.validate(net, data(), verbose=False)[0]["val"]]
        run.fit(net, data())
        run.fit_loop.max_epochs = 4
        run.fit(net, data())
        values += [run.test(net, data(), verbose=False)[0]["val"], *torch.cat(run.predict(net, data())).flatten()]
        run = trainer(strategy)  # and nobody has the other one any more
        run.fit(net, data())
        if strategy == 3:
            run.strategy.engine.destroy()
        assert not any("Released" in type(param).__name__ for param in net.parameters())
        found.append([*map(float, values), *net.losses, *(float(value.sum()) for value in weights(net))])
    return found


@pytest.mark.long
def test_one_model_goes_through_all_that_a_trainer_does(pool: Any) -> None:
    ours, ddp = pool.run(2, in_turn)[0]
    assert ours == pytest.approx(ddp, rel=2e-6, abs=1e-6)


def complaint(kind: str) -> str:
    """What is said of something that cannot be."""
    from lightning_runs import Net, adamw, data, trainer

    from zero.lightning import ZeroStrategy

    options: dict[str, dict[str, Any]] = {
        "value": {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
        "double": {"precision": "64-true"},
        "accumulation": {"accumulate_grad_batches": 4},
        "clipping": {"gradient_clip_val": 2.0},
        "precision": {"precision": "bf16-true"},
    }
    makes: dict[str, Any] = {
        "two": lambda params: ([adamw([param])["optimizer"] for param in params], []),
        "none": lambda params: None,
        "lbfgs": lambda params: torch.optim.LBFGS(params),
    }
    config = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "fp16": {"enabled": True}}
    keys = {"accumulation": "gradient_accumulation_steps", "clipping": "gradient_clipping", "precision": "fp16"}
    try:
        if kind == "stage":
            ZeroStrategy(3, {"zero_optimization": {"stage": 2}})
        if kind == "option":
            ZeroStrategy(find_unused_parameters=True)
        if kind == "early":
            _ = ZeroStrategy(3).engine
        strategy = ZeroStrategy(1, {keys[kind]: config[keys[kind]]} if kind in keys else None)
        net = Net(make=makes.get(kind))
        net.automatic_optimization = kind != "two"
        trainer(strategy, **options.get(kind, {})).fit(net, data())
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


COMPLAINTS = {
    "value": r"MisconfigurationException: .*gradient_clip_algorithm='value'; the engine clips 'norm'",
    "double": r"MisconfigurationException: .*DoublePrecision with precision '64-true'; wanted .*bf16-true",
    "accumulation": r"gradient_accumulation_steps is 2, and Trainer\(accumulate_grad_batches=4\)",
    "clipping": r"gradient_clipping is 0.5, and Trainer\(gradient_clip_val=2.0\)",
    "precision": r"the config enables fp16, and Trainer has precision='bf16-true'",
    "two": r"MisconfigurationException: .*gave \['AdamW', .*wanted one optimizer",
    "none": r"gave \['_MockOptimizer'\]; wanted one optimizer .* or a section `optimizer` in the config",
    "lbfgs": r"ValueError: .*LBFGS",
    "stage": r"ZeroStrategy\(stage=3\): the config says stage 2",
    "option": r"TypeError: ZeroStrategy: got find_unused_parameters; wanted stage, config, accelerator",
    "early": r"RuntimeError: .*no engine before fit",
}


def test_what_cannot_be_is_said(pool: Any) -> None:
    for kind, pattern in COMPLAINTS.items():
        text = pool.run(1, complaint, kind)[0]
        assert re.search(pattern, text), (pattern, text)


@pytest.fixture(params=[[3], pytest.param([0, 1, 2, 3], marks=pytest.mark.long)], ids=["3", "all"])
def stages(request: pytest.FixtureRequest) -> list[int]:
    return request.param
