"""The promise: `zero.checkpointing` has DeepSpeed's names, and changes no bit wherever saved inputs rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from marks import longer
from models import batch
from recomputing import Net, all_same, make, result, same, settings, trained
from torch import nn
from torch.nn import functional as F

import zero
from zero import checkpointing
from zero.config import ConfigError
from zero.config.sections import ActivationCheckpointing
from zero.core.comm import local_device
from zero.recompute.holder import HOLDER
from zero.recompute.saved_inputs import InputStore, restored

FULL = {"modules": ["Block"]}
SELECTIVE = {"modules": ["Block"], "policy": "selective"}


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """Leave nothing configured behind."""
    yield
    HOLDER.__init__()


class Group:
    """What Megatron's mpu has of it."""

    def get_model_parallel_group(self) -> Any:
        """All ranks."""
        return dist.group.WORLD


class Middle(NamedTuple):
    """Tensors in a named tuple."""

    x: torch.Tensor
    note: str


def blocks(count: int = 3) -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(6, 18), nn.GELU(), nn.Dropout(0.3), nn.Linear(18, 6)) for _ in range(count)]


def call(block: nn.Module, middle: Middle, mask: torch.Tensor, *, shared: torch.Tensor, extra: Any = None) -> Middle:
    """A function of tensors in many places. The transposed one makes strides matter."""
    y = block(middle.x) * mask + shared.t()[: middle.x.shape[0]]
    return Middle(y + extra[0] if extra else y, middle.note)


def gradients(through: Callable[..., Any], autocast: bool = False, seed: int = 8, width: int = 6) -> list[torch.Tensor]:
    """Gradients of blocks and of an input that all of them share, and what is drawn afterwards."""
    found = blocks()
    shared = torch.arange(5.0 * width).view(width, 5).requires_grad_()
    torch.manual_seed(seed)
    x = Middle(torch.ones(5, 6).requires_grad_() * 2.0, "as it is")
    other = (shared * 1.5).t().contiguous().t()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        for block in found:
            x = through(call, block, x, torch.ones(6), shared=other, extra=(other[0, 0], None))
            assert x.note == "as it is"
    x.x.float().square().sum().backward()
    return [*(param.grad for block in found for param in block.parameters()), shared.grad, torch.rand(2)]


def plain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


RESTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "partition": {"partition_activations": True},
    "block": {"contiguous_checkpointing": True, "num_checkpoints": 3},
    "host": {"checkpoint_in_cpu": True},
    "host and partition": {"checkpoint_in_cpu": True, "partition_activations": True},
    "all": {
        "checkpoint_in_cpu": True,
        "partition_activations": True,
        "contiguous_checkpointing": True,
        "num_checkpoints": 2,
        "synchronize": True,
        "profile": True,
    },
}


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, *longer(1, 3)])
def test_no_bit_changes_wherever_inputs_rest(world):
    for name, arguments in RESTS.items():
        checkpointing.configure(Group() if dist.get_rank() else dist.group.WORLD, **arguments)
        for autocast in (False, True):
            assert equal(gradients(plain, autocast), gradients(checkpointing.checkpoint, autocast)), (name, autocast)
    HOLDER.__init__()


class Own(Net):
    """Calls the function on its blocks and on the parts of one, without knowing an engine."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        turn = self.turn.to(x.dtype)
        for block in self.blocks:
            x = checkpointing.checkpoint(self.one, block, x, (turn[0], turn[1]), turn[0, 0])
        return x

    def one(self, block: nn.Module, x: torch.Tensor, turn: Any, scale: torch.Tensor) -> torch.Tensor:
        x = checkpointing.checkpoint(torch.add, x, torch.zeros(())) if block is self.blocks[1] else x
        return block(x, turn, scale=scale)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_inside_an_engine_its_json_counts(stage):
    """Trainings under the JSON alone, with the bytes that the last saved inputs of each step had."""
    base = trained(make(), settings(stage, {}))
    section = {"contiguous_memory_optimization": True, "number_checkpoints": 4}
    taken: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        put = InputStore.put
        patch.setattr(
            InputStore, "put", lambda rest, tensors: [put(rest, tensors), taken.append(rest.buffers.nbytes)][0]
        )
        assert same(base, trained(make(Own), settings(stage, {})))
        assert same(
            base,
            trained(make(Own), settings(stage, {}, activation_checkpointing={**section, "number_checkpoints": None})),
        )
        assert max(taken) == 0, "without a number there is no block"
        values = settings(stage, {}, activation_checkpointing=section)
        assert same(base, trained(make(Own), values))
        assert max(taken) == 4 * 4096
        checkpointing.configure(None, values, num_checkpoints=5)  # goes before what the engine's JSON says
        assert same(base, trained(make(Own), values))
        assert max(taken) == 5 * 4096
        HOLDER.__init__()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3, *longer(0, 2)])
def test_slices_of_inputs_change_no_bit_of_a_training(stage):
    """Ranks that compute one sample together: under the JSON each keeps a slice of every saved input."""
    checkpointing.configure(Group())
    found = []
    for section, host in ({}, False), (FULL, False), (SELECTIVE, False), (FULL, True):
        rest = {"partition_activations": bool(section), "cpu_checkpointing": host}
        engine = zero.initialize(model=make(), config=settings(stage, section, activation_checkpointing=rest))[0]
        assert engine._training.recomputing.inputs.axis.size == (2 if section else 1)
        torch.manual_seed(100)
        losses = []
        for step in range(3):
            loss = engine(*batch(step, 2))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found.append(result(engine, losses))
    HOLDER.__init__()
    all_same(found)


def drop(x: torch.Tensor) -> torch.Tensor:
    """Dropout of a stream of the axis, then dropout of torch's own."""
    with checkpointing.get_cuda_rng_tracker().fork():
        x = F.dropout(x, 0.5)
    return F.dropout(torch.sin(x), 0.5)


def masks(seed: int) -> list[torch.Tensor]:
    """What goes through `drop` twice, and its gradient, plain and recomputed; what is drawn afterwards."""
    checkpointing.configure(dist.group.WORLD)
    found = []
    for through in (plain, checkpointing.checkpoint):
        checkpointing.model_parallel_cuda_manual_seed(seed)
        x = torch.ones(40, requires_grad=True, device=local_device())
        y = through(drop, through(drop, x * 1.0))
        y.sum().backward()
        with checkpointing.get_cuda_rng_tracker().fork():
            own = torch.rand(3, device=x.device)
        found.append(torch.cat([x.grad, y.detach(), own, torch.rand(3, device=x.device)]).cpu())
    HOLDER.__init__()
    return found


def test_named_streams_are_restored(pool):
    (plain0, again0), (plain1, again1) = pool.run(2, masks, 123)
    assert torch.equal(plain0, again0) and torch.equal(plain1, again1)
    assert torch.equal(plain0[-3:], plain1[-3:]), "ranks draw alike outside of the stream"
    assert not torch.equal(plain0[-6:-3], plain1[-6:-3]), "and apart in it"


def test_arguments_go_before_the_json():
    assert not checkpointing.is_configured()
    values = {"activation_checkpointing": {"cpu_checkpointing": True, "profile": True, "number_checkpoints": 7}}
    checkpointing.configure(None, values, profile=False, contiguous_checkpointing=True)
    assert checkpointing.is_configured()
    section = {"cpu_checkpointing": True, "contiguous_memory_optimization": True, "number_checkpoints": 7}
    assert dict(HOLDER.inputs.settings) == dict(ActivationCheckpointing(**section))
    checkpointing.configure(
        None, {"activation_checkpointing": {**section, "number_checkpoints": None}}, num_checkpoints=7
    )
    assert dict(HOLDER.inputs.settings) == dict(ActivationCheckpointing(**section))
    checkpointing.reset()
    assert checkpointing.is_configured()


def test_what_cannot_be_configured_is_said():
    with pytest.raises(ConfigError, match="number_checkpoints: is missing; contiguous_memory_optimization takes room"):
        checkpointing.configure(None, contiguous_checkpointing=True)
    with pytest.raises(ConfigError, match="number_checkpoints: got 0, wanted an integer"):
        checkpointing.configure(None, num_checkpoints=0)
    with pytest.raises(ValueError, match="mpu_: got a str; wanted an object with get_model_parallel_group"):
        checkpointing.configure("tp")
    with pytest.raises(ConfigError, match="activation_checkpointing: unknown key 'cpu_checkpoint'"):
        checkpointing.configure(None, {"activation_checkpointing": {"cpu_checkpoint": True}})
    assert not checkpointing.is_configured()


@pytest.mark.ranks(2)
def test_ranks_must_configure_alike():
    with pytest.raises(RuntimeError, match=r"^the ranks of mpu_ do not configure the same: ") as caught:
        checkpointing.configure(Group(), partition_activations=dist.get_rank() == 0)
    assert not checkpointing.is_configured()
    assert all(f"partition_activations = {wanted}" in str(caught.value) for wanted in (True, False))


@pytest.mark.ranks(3)
def test_each_rank_keeps_its_slice():
    """Of inputs of several sizes and strides, which come back as they were."""
    checkpointing.configure(dist.group.WORLD, partition_activations=True)
    ones = [torch.arange(float(count), device=local_device()) for count in (1, 2, 7, 64)]
    made = [each.requires_grad_() * 1.0 for each in ones]
    made += [made[3].view(8, 8).t(), made[3].view(8, 8)[:, ::2], made[2].expand(2, 7), made[3].to(torch.bfloat16)]
    tickets = [HOLDER.inputs.put([tensor])[0] for tensor in made]
    back = [restored(ticket) for ticket in tickets]
    nbytes = [ticket.call._slices[ticket.index].nbytes for ticket in tickets]
    HOLDER.__init__()
    assert nbytes == [4, 4, 12, 88, 88, 44, 20, 44]
    assert all(tensor.stride() == other.stride() for tensor, other in zip(made[:5], back, strict=False))
    assert all(torch.equal(a, b) and b.requires_grad for a, b in zip(made, back, strict=True))
