"""The promise: Muon on shards is torch.optim.Muon, bit by bit, wherever its state rests and whatever is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import WIDE, batch, config, equal, make_net, share, train, train_parts
from offload_cases import BOTH, OPTIMIZER, as_on_a_gpu
from oracle import Training, near
from torch import nn

import zero
from zero.kernels.newton_schulz import newton_schulz
from zero.optim import matrix
from zero.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state

STEPS, PARTS = 3, 4  # micro-batches of a step, whatever the ranks
MATRICES = 6
MUON = {"lr": 1e-2, "muon_lr": 2e-2, "weight_decay": 0.1, "ns_method": "standard"}


def matrices_only(net: nn.Module) -> nn.Module:
    for name, param in net.named_parameters():
        param.requires_grad_("blocks" in name and param.ndim == 2)
    return net


def gradients(net: nn.Module, params: list[nn.Parameter], step: int) -> list[torch.Tensor]:
    """The means over micro-batches, added in the order of the tree."""
    parts = []
    for part in range(PARTS):
        parts.append(torch.autograd.grad(net(*batch(PARTS * step + part, 2)), params))
    return [((a + b) + (c + d)) * 0.25 for a, b, c, d in zip(*parts, strict=True)]


def torch_muon(clipping: float = 0.0, **arguments: Any) -> dict[str, torch.Tensor]:
    """Plain torch in one process."""
    net = matrices_only(make_net())
    params = [param for param in net.parameters() if param.requires_grad]
    optimizer = torch.optim.Muon(params, **({"lr": 2e-2, "weight_decay": 0.1} | arguments))
    for step in range(STEPS):
        for param, grad in zip(params, gradients(net, params, step), strict=True):
            param.grad = grad
        optimizer.step()
    return {name: param.detach() for name, param in net.named_parameters()}


def trained(
    stage: int, *, section: dict[str, Any] | None = None, params: dict[str, Any] | None = None, **more: Any
) -> Any:
    """The same under an engine; its parameters, and how often this rank has run Newton-Schulz."""
    world = dist.get_world_size()
    settings = config(stage, world, accumulation=PARTS // world, zero={"reduce": "tree"}, **more)
    settings["zero_optimization"] |= section or {}
    settings["optimizer"] = {"type": "Muon", "params": MUON | (params or {})}
    model, calls = matrices_only(make_net()), []
    with pytest.MonkeyPatch.context() as patch:
        plain = matrix.torch_newton_schulz
        patch.setattr(matrix, "torch_newton_schulz", lambda *args: calls.append(args[0].shape) or plain(*args))
        engine, *_ = zero.initialize(model=model, config=settings)
        train_parts(engine, range(STEPS), PARTS)
        engine.destroy()
    return {name: param.detach() for name, param in model.named_parameters()}, len(calls)


def every_stage(stages: tuple[int, ...] = (0, 1, 2, 3), section: dict[str, Any] | None = None) -> list[Any]:
    with as_on_a_gpu(section is not None):
        return [trained(stage, section=section) for stage in stages]


@pytest.mark.parametrize("world", [2, 4, *longer(1)])
def test_every_stage_and_world_is_torchs_bit_by_bit(pool, world):
    wanted = torch_muon()
    ranks = pool.run(world, every_stage)
    for rank in ranks:
        for stage, (found, _) in enumerate(rank):
            wrong = [name for name, value in wanted.items() if not torch.equal(found[name], value)]
            assert wrong == [], f"stage {stage}"
    for stage in range(4):
        calls = sum(rank[stage][1] for rank in ranks)
        whole = world if stage == 0 else 1  # where nothing is cut, every rank does all
        assert calls == whole * MATRICES * STEPS, f"stage {stage}"


NVME = {"offload_optimizer": {"device": "nvme"}}


@pytest.mark.parametrize(
    ("world", "stages", "section"),
    [(2, (1,), OPTIMIZER), (1, (3,), BOTH), *longer((2, (3,), BOTH), (4, (2, 3), OPTIMIZER), (2, (3,), NVME))],
)
def test_offloaded_state_trains_alike(pool, world, stages, section, tmp_path):
    if section is NVME:
        section = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    wanted = torch_muon()
    for rank in pool.run(world, every_stage, stages, section):
        for found, _ in rank:
            assert all(torch.equal(found[name], value) for name, value in wanted.items())


def in_fp64(matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> torch.Tensor:
    return newton_schulz(matrix[None].double(), coefficients, steps, eps, torch.float64)[0]


class Both:
    """torch.optim.Muon for matrices of hidden layers, AdamW for the rest."""

    def __init__(self, net: nn.Module) -> None:
        hidden = {name for name, param in net.named_parameters() if "blocks" in name and param.ndim == 2}
        ours, others = ([p for n, p in net.named_parameters() if (n in hidden) is those] for those in (True, False))
        self.made = [
            torch.optim.Muon(ours, lr=2e-2, weight_decay=0.1),
            torch.optim.AdamW(others, lr=1e-2, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1),
        ]

    def step(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if self.made[0].param_groups[0]["params"][0].dtype is torch.float64:  # torch's own takes bf16 even there
                patch.setattr("torch.optim._muon._zeropower_via_newtonschulz", in_fp64)
            for one in self.made:
                one.step()

    def zero_grad(self) -> None:
        for one in self.made:
            one.zero_grad()


def whole(kind: str, moments: str, width: int) -> list[dict[str, Any]]:
    """A whole net under each stage."""
    params = {**MUON, "ns_method": kind, "zero": {"moments": moments}}
    more = {"optimizer": {"type": "Muon", "params": params}, "gradient_clipping": 0.5}
    world = dist.get_world_size()
    return [train(make_net(width=width), world, config(stage, world, **more), STEPS) for stage in range(4)]


@pytest.mark.parametrize(("kind", "moments"), [("gram", "8bit"), *longer(("standard", "bf16"), ("gram", "fp32"))])
def test_stages_agree_in_every_format_beside_adamw(pool, kind, moments):
    for stages in pool.run(2, whole, kind, moments, WIDE):
        assert all(equal(one, stages[0]) for one in stages)


@pytest.mark.long
def test_a_whole_net_is_as_near_to_the_truth_as_torchs(pool):
    training = Training(2, STEPS, 1, 0.5, optimizer=Both)
    assert near(pool.run(2, whole, "gram", "fp32", 12)[0][3]["params"], training)


def clients(stage: int) -> dict[str, torch.Tensor]:
    world = dist.get_world_size()
    net = matrices_only(make_net())
    settings = config(stage, world, accumulation=PARTS // world, zero={"reduce": "tree"})
    del settings["optimizer"]
    client = torch.optim.Muon(
        [param for param in net.parameters() if param.requires_grad],
        lr=2e-2,
        nesterov=False,
        adjust_lr_fn="match_rms_adamw",
        ns_steps=3,
    )
    engine, *_ = zero.initialize(model=net, optimizer=client, config=settings)
    train_parts(engine, range(STEPS), PARTS)
    engine.destroy()
    return {name: param.detach() for name, param in net.named_parameters()}


def test_a_torch_muon_of_the_script_runs_on_shards(pool):
    wanted = torch_muon(nesterov=False, adjust_lr_fn="match_rms_adamw", ns_steps=3)
    for found in pool.run(2, clients, 3):
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


class Fused(nn.Module):
    """A fused projection and a stack of experts."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        values = torch.randn(3, 4, 6), torch.randn(2, 6, 5)
        if apart:
            self.parts = nn.ParameterList([part.clone() for value in values for part in value])
        else:
            self.qkv, self.experts = nn.Parameter(values[0].reshape(12, 6)), nn.Parameter(values[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "parts"):
            return (x @ self.qkv.T).sin().square().mean() + (x @ self.experts).cos().mean(1).square().sum()
        q, experts = torch.cat([*self.parts[:3]]), torch.stack([*self.parts[3:]])
        return (x @ q.T).sin().square().mean() + (x @ experts).cos().mean(1).square().sum()


def fused(kind: str) -> Any:
    """Parameters that Muon cuts into parts, and the parts as parameters."""
    found = []
    for apart in (False, True):
        net = Fused(apart)
        for param in net.parameters():
            param.use_muon = True
        params = {**MUON, "ns_method": kind, **({} if apart else {"split": {"qkv": 3}})}
        engine, *_ = zero.initialize(model=net, config=config(3, 2, optimizer={"type": "Muon", "params": params}))
        for step in range(2):
            engine.backward(engine(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))))
            engine.step()
        engine.destroy()
        found.append(torch.cat([param.detach().flatten() for param in net.parameters()]))
    return found


@pytest.mark.parametrize("kind", ["standard", "gram"])
def test_fused_projections_and_stacks_of_experts_are_many_matrices(pool, kind):
    whole, apart = pool.run(2, fused, kind)[0]
    assert torch.equal(whole, apart)


@pytest.mark.long
@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_beside_gradients_and_weights_in_8_bits(stage):
    """The rule is as exact as ever, of the gradient that comes of 8 bits."""
    grads = []
    for coded in (False, True):
        net = matrices_only(make_net(width=WIDE))
        section = {"stage": stage, "zero_quantized_gradients": coded, "zero_quantized_weights": coded and stage == 3}
        more = {"optimizer": {"type": "Muon", "params": MUON}, "zero_optimization": section}
        engine, *_ = zero.initialize(model=net, config=config(stage, 2, **more))
        weight = net.blocks[0].up.weight
        for number in range(2):
            engine.backward(engine(*share(number)))
            before, grad = safe_get_full_fp32_param(weight), safe_get_full_grad(weight)
            momentum = safe_get_full_optimizer_state(weight, "momentum_buffer")
            engine.step()
            plain = nn.Parameter(before.clone())
            plain.grad = grad
            optimizer = torch.optim.Muon([plain], lr=MUON["muon_lr"], weight_decay=MUON["weight_decay"])
            optimizer.state[plain]["momentum_buffer"] = momentum.clone()
            optimizer.step()
            assert torch.equal(safe_get_full_fp32_param(weight), plain.detach())
        grads.append(grad)
        engine.destroy()
    assert 0 < (grads[1] - grads[0]).norm() < 0.1 * grads[0].norm()


def interrupted(folder: Any, stage: int, load: bool) -> dict[str, torch.Tensor]:
    """Two steps and a checkpoint, or that checkpoint and two more steps."""
    world = dist.get_world_size()
    params = {**MUON, "zero": {"moments": "8bit"}}
    more = {"optimizer": {"type": "Muon", "params": params}, "zero": {"reduce": "tree"}, "accumulation": PARTS // world}
    net = make_net(width=WIDE, seed=9 if load else 7)
    engine, *_ = zero.initialize(model=net, config=config(stage, world, **more))
    if load:
        engine.load_checkpoint(folder)
    else:
        train_parts(engine, range(2), PARTS)
        engine.save_checkpoint(folder)
    train_parts(engine, range(2, 4), PARTS)
    engine.destroy()
    return {name: param.detach() for name, param in net.named_parameters()}


@pytest.mark.parametrize(("world", "stage"), [(4, 1), *longer((1, 0), (2, 2), (1, 3))])
def test_a_checkpoint_goes_on_at_another_number_of_ranks(pool, tmp_path, world, stage):
    wanted = pool.run(2, interrupted, tmp_path, 3, False)[0]
    for found in pool.run(world, interrupted, tmp_path, stage, True):
        assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []
