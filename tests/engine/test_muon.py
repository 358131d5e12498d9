"""The promise: Muon on shards is torch.optim.Muon, bit by bit, wherever its state rests and whatever is cut.

NorMuon, which is Muon with `beta2`, divides each row as its paper says, with one number of state for each row. Which
parameters Muon updates follows from the model, can be said by hand, and is said in the log.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from marks import longer
from models import batch, config, make_net
from offload_cases import BOTH, OPTIMIZER, as_on_a_gpu
from scenario import Record, differences, run, same, scenario
from torch import nn
from torch.optim._muon import _zeropower_via_newtonschulz

import zero
from zero.config.optimizers import MuonParams
from zero.optim import matrix
from zero.optim.muon_groups import muon_groups
from zero.utils import safe_get_full_fp32_param

STEPS, PARTS = 3, 4  # micro-batches of a step, whatever the ranks
MATRICES, ROWS = 6, 3 * (25 + 12)
LR, DECAY, BETA2 = 2e-2, 0.1, 0.9
MUON = {"lr": 1e-2, "muon_lr": LR, "weight_decay": DECAY, "ns_method": "standard"}


def muon(stage: int, section: dict[str, Any] | None = None, **params: Any) -> dict[str, Any]:
    """The JSON, with sums whose order does not depend on the ranks."""
    optimizer = {"type": "Muon", "params": MUON | params}
    return {"stage": stage, "section": section or {}, "optimizer": optimizer, "zero": {"reduce": "tree"}}


def matrices(width: int = 12) -> nn.Module:
    """A net of which only matrices of hidden layers are trained."""
    net = make_net(width=width)
    for name, param in net.named_parameters():
        param.requires_grad_("blocks" in name and param.ndim == 2)
    return net


def by_hand(update: Callable[[list[nn.Parameter]], Callable[[], None]]) -> dict[str, torch.Tensor]:
    """Plain torch in one process: `update` of the parameters gives what makes a step of their gradients."""
    net = matrices()
    params = [param for param in net.parameters() if param.requires_grad]
    step = update(params)
    for number in range(STEPS):
        parts = [torch.autograd.grad(net(*batch(PARTS * number + part, 2)), params) for part in range(PARTS)]
        for param, a, b, c, d in zip(params, *parts, strict=True):
            param.grad = ((a + b) + (c + d)) * 0.25  # in the order of the tree
        step()
    return {name: param.detach() for name, param in net.named_parameters()}


@functools.cache
def torch_muon(**arguments: Any) -> dict[str, torch.Tensor]:
    return by_hand(lambda params: torch.optim.Muon(params, **({"lr": LR, "weight_decay": DECAY} | arguments)).step)


def assert_same(records: list[Record], wanted: dict[str, torch.Tensor], what: str = "") -> None:
    for record in records:
        assert [name for name, value in wanted.items() if not torch.equal(record.weights[name], value)] == [], what


def counted(jsons: list[dict[str, Any]]) -> list[tuple[Record, int]]:
    """Trainings on this rank, with how often it has run Newton-Schulz in each, and the bytes of its state."""
    found, plain, calls = [], matrix.torch_newton_schulz, []
    with pytest.MonkeyPatch.context() as patch, as_on_a_gpu(bool(jsons[0]["section"])):
        patch.setattr(matrix, "torch_newton_schulz", lambda *args: calls.append(args[0].shape) or plain(*args))
        for json in jsons:
            before = len(calls)
            record = run(matrices, json, STEPS, parts=PARTS, keep=state_bytes)
            found.append((record, len(calls) - before))
    return found


def state_bytes(engine: Any) -> int:
    return engine.state_nbytes().optimizer


@pytest.mark.parametrize("world", [2, *longer(4)])
def test_every_stage_and_world_is_torchs_bit_by_bit(pool, world):
    ranks = pool.run(world, counted, [muon(stage) for stage in range(4)])
    for stage, of_stage in enumerate(zip(*ranks, strict=True)):
        assert_same([record for record, _ in of_stage], torch_muon(), f"stage {stage}")
        whole = world if stage == 0 else 1  # where nothing is cut, every rank does all
        assert sum(calls for _, calls in of_stage) == whole * MATRICES * STEPS, f"stage {stage}"


NVME = {"offload_optimizer": {"device": "nvme"}}


@pytest.mark.parametrize(
    ("world", "stages", "section"),
    [(2, (1,), OPTIMIZER), (1, (3,), BOTH), *longer((4, (2,), OPTIMIZER), (2, (3,), NVME))],
)
def test_offloaded_state_trains_alike(pool, world, stages, section, tmp_path):
    if section is NVME:
        section = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    for rank in pool.run(world, counted, [muon(stage, section) for stage in stages]):
        assert_same([record for record, _ in rank], torch_muon())


def under_init() -> nn.Module:
    with zero.Init(config_dict_or_path=config(3, 1)):
        return matrices()


def test_matrices_that_init_has_cut_have_their_true_shapes():
    assert_same([run(under_init, muon(3), STEPS, parts=PARTS)], torch_muon())


@pytest.mark.parametrize("more", [{}, {"bf16": {"enabled": True}}])
def test_matrices_are_orthogonalised_where_nothing_is_said_of_zero(more):
    settings = config(0, 1, optimizer={"type": "Muon", "params": MUON | {"weight_decay": 0}}, **more)
    del settings["zero_optimization"]
    engine, *_ = zero.initialize(model=matrices(), config=settings)
    trained = {name: param for name, param in engine.module.named_parameters() if param.requires_grad}
    before = {name: safe_get_full_fp32_param(param) for name, param in trained.items()}
    engine.backward(engine(*batch(0, 2)))
    engine.step()
    for name, param in trained.items():
        moved = (before[name] - safe_get_full_fp32_param(param)) / (LR * max(1, len(param) / param.shape[1]) ** 0.5)
        singular = torch.linalg.svdvals(moved.double())
        assert singular[0] < 1.3 and (singular > 0.5).sum() >= 5, f"{name}: a gradient has no such singular values"
    engine.destroy()


def whole_net(stage: int, kind: str, moments: str) -> dict[str, Any]:
    return {**muon(stage, ns_method=kind, zero={"moments": moments}), "gradient_clipping": 0.5, "zero": {}}


@pytest.mark.parametrize(("kind", "moments"), [("gram", "8bit"), *longer(("standard", "bf16"), ("gram", "fp32"))])
def test_stages_agree_in_every_format_beside_adamw(pool, kind, moments):
    stages = [scenario(pool, "wide", whole_net(stage, kind, moments)) for stage in range(4)]
    for ranks in zip(*stages, strict=True):
        assert [differences(one, ranks[0]) for one in ranks] == [[]] * 4


def clients() -> dict[str, torch.Tensor]:
    net = matrices()
    settings = config(3, 2, accumulation=PARTS // 2, zero={"reduce": "tree"})
    del settings["optimizer"]
    trained = [param for param in net.parameters() if param.requires_grad]
    client = torch.optim.Muon(trained, lr=LR, nesterov=False, adjust_lr_fn="match_rms_adamw", ns_steps=3)
    engine, *_ = zero.initialize(model=net, optimizer=client, config=settings)
    for number in range(engine.global_rank, STEPS * PARTS, 2):
        engine.backward(engine(*batch(number, 2)))
        engine.step()
    engine.destroy()
    return {name: param.detach() for name, param in net.named_parameters()}


def test_a_torch_muon_of_the_script_runs_on_shards(pool):
    wanted = torch_muon(weight_decay=0.1, nesterov=False, adjust_lr_fn="match_rms_adamw", ns_steps=3)
    for found in pool.run(2, clients):
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


class Fused(nn.Module):
    """A fused projection and a stack of experts, or their parts."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        values = torch.randn(3, 4, 6), torch.randn(2, 6, 5)
        if apart:
            self.parts = nn.ParameterList([part.clone() for value in values for part in value])
        else:
            self.qkv, self.experts = nn.Parameter(values[0].reshape(12, 6)), nn.Parameter(values[1])
        for param in self.parameters():
            param.use_muon = True

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        x = nn.functional.one_hot(x.flatten() % 6, 6).float()
        if hasattr(self, "parts"):
            qkv, experts = torch.cat([*self.parts[:3]]), torch.stack([*self.parts[3:]])
        else:
            qkv, experts = self.qkv, self.experts
        return (x @ qkv.T).sin().square().mean() + (x @ experts).cos().mean(1).square().sum()


@pytest.mark.parametrize("kind", ["standard", "gram"])
def test_fused_projections_and_stacks_of_experts_are_many_matrices(pool, kind):
    whole = scenario(pool, functools.partial(Fused, False), muon(3, ns_method=kind, split={"qkv": 3}))[0]
    apart = scenario(pool, functools.partial(Fused, True), muon(3, ns_method=kind))[0]
    one, other = (torch.cat([value.flatten() for value in each.weights.values()]) for each in (whole, apart))
    assert torch.equal(one, other)


NORMUON = {"beta2": BETA2}


@functools.cache
def normuon() -> dict[str, torch.Tensor]:
    """Li et al. 2025, algorithm 1, as the authors' code has it, but that an update travels in bf16."""

    def update(params: list[nn.Parameter]) -> Callable[[], None]:
        means = [torch.zeros_like(param) for param in params]
        squares = [torch.zeros(len(param), 1) for param in params]

        @torch.no_grad()
        def step() -> None:
            for param, mean, square in zip(params, means, squares, strict=True):
                mean.lerp_(param.grad, 1 - 0.95)
                nesterov = param.grad.lerp(mean, 0.95)
                update = _zeropower_via_newtonschulz(nesterov, (3.4445, -4.7750, 2.0315), 5, 1e-7).float()
                norm = update.norm()
                square.lerp_(update.square().mean(1, keepdim=True), 1 - BETA2)
                update = update / (square.sqrt() + 1e-10)
                update = update * (norm / (update.norm() + 1e-10))
                size = LR * max(1, param.shape[0] / param.shape[1]) ** 0.5
                param.mul_(1 - LR * DECAY).add_(update.bfloat16(), alpha=-size)

        return step

    return by_hand(update)


@pytest.mark.parametrize(("world", "stage", "section"), [(2, 3, {}), *longer((2, 0, {}), (4, 1, OPTIMIZER))])
def test_normuon_is_its_paper_and_keeps_a_number_for_each_row(pool, world, stage, section):
    ranks = pool.run(world, counted, [muon(stage, section), muon(stage, section, **NORMUON)])
    assert_same([record for _, (record, _) in ranks], normuon())
    if not section:  # of host memory whole arenas are counted
        more = [other.seen[-1] - one.seen[-1] for (one, _), (other, _) in ranks]
        assert sum(more) == 4 * ROWS * (world if stage == 0 else 1), "each on the rank that uses it"


@pytest.mark.parametrize(
    ("world", "stage", "params"),
    [(2, 1, {"zero": {"moments": "8bit"}}), *longer((1, 0, NORMUON), (4, 2, {}))],
)
def test_a_checkpoint_goes_on_at_another_number_of_ranks(pool, tmp_path, world, stage, params):
    """The second one holds what was loaded, as no step has shared it out among the ranks yet."""
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    more = {"steps": 2, "parts": PARTS}
    wanted = scenario(pool, "wide", muon(3, **params), **(more | {"steps": 4}))[0]
    scenario(pool, "wide", muon(3, **params), **more, save=one)
    scenario(pool, "wide", muon(stage, **params), world, steps=0, parts=PARTS, load=one, save=two)
    for folder in (one, two):
        for found in scenario(pool, "wide", muon(stage, **params), world, **more, first=2, load=folder):
            assert same(found, wanted, "weights")


# --- which parameters it updates -------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Of each kind one, and no block."""

    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.ones(4, 8))
        self.words = nn.Embedding(11, 8)
        self.filter = nn.Conv1d(8, 8, 3)
        self.patches = nn.Conv2d(3, 8, 4)
        self.hidden = nn.Linear(8, 8)
        self.experts = nn.Parameter(torch.ones(2, 8, 8))
        self.out = nn.Linear(8, 11, bias=False)


def chosen(model: nn.Module, groups: Any = None, **params: Any) -> list[str]:
    found = muon_groups(model, groups or [{"params": list(model.parameters())}], MuonParams(**params))
    names = {param: name for name, param in model.named_parameters()}
    assert sum(len(group["params"]) for group in found) == len(names)
    return [names[param] for group in found if group["use_muon"] for param in group["params"]]


def test_matrices_of_hidden_layers_are_muons():
    assert chosen(make_net(blocks=1)) == ["blocks.0.up.weight", "blocks.0.down.weight"]
    assert chosen(Mixed()) == ["experts", "hidden.weight"]


def test_the_head_is_the_last_layer_or_what_the_model_says():
    trunk = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(3, 3, bias=False) for _ in range(2)])})
    assert chosen(trunk) == ["blocks.0.weight", "blocks.1.weight"], "it has none"
    assert chosen(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))) == ["0.weight"]
    model = Mixed()
    model.get_output_embeddings = lambda: model.hidden
    assert chosen(model) == ["experts", "out.weight"]
    model.out.weight = model.words.weight
    assert chosen(model) == ["experts"], "a tied one is an embedding"


def test_use_muon_decides():
    model = Mixed()
    model.hidden.weight.use_muon, model.out.weight.use_muon, model.patches.weight.use_muon = False, True, True
    assert chosen(model) == ["experts", "patches.weight", "out.weight"]
    groups = [{"params": [model.words.weight], "use_muon": True}]
    groups += [{"params": [param for name, param in model.named_parameters() if "words" not in name]}]
    assert chosen(model, groups)[0] == "words.weight"


def test_what_does_not_fit_is_refused():
    net = make_net()
    net.blocks[0].up.bias.use_muon = True
    with pytest.raises(ValueError, match=r"'blocks.0.up.bias' of shape \(25,\) is no matrix"):
        chosen(net)
    with pytest.raises(ValueError, match="no parameter is a matrix of a hidden layer"):
        chosen(nn.Linear(3, 3))
    settings = config(0, 1, optimizer={"type": "Muon", "params": {"split": {"*.up.weight": 2}}})
    with pytest.raises(ValueError, match=r"optimizer.params.split: 'blocks.0.up.weight' has 25 rows"):
        zero.initialize(model=make_net(), config=settings)
    settings["optimizer"]["params"]["split"] = {"*.qkv.weight": 3}
    with pytest.raises(ValueError, match=r"optimizer.params.split: '\*.qkv.weight' is the name of no parameter"):
        zero.initialize(model=make_net(), config=settings)
    with pytest.raises(ValueError, match="name it in the section 'optimizer' of the JSON"):
        zero.FusedOptimizer(make_net().parameters(), "Muon")


def test_the_log_says_which_rule_each_gets(caplog):
    with caplog.at_level(logging.INFO, logger="zero"):
        engine, *_ = zero.initialize(model=make_net(), config=config(0, 1, optimizer={"type": "Muon", "params": {}}))
    engine.destroy()
    assert (
        "Muon updates 6 parameters: 3 x blocks.*.up.weight, 3 x blocks.*.down.weight; AdamW updates 17 parameters: "
        "embed.weight, 3 x blocks.*.norm.weight, " in caplog.text
    )
