"""Models in stages, and their training: with layers divided among ranks, or by micro-batches in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import config
from states import state_of
from torch import nn

import zero
from zero.core.comm import local_device

WIDTH, CLASSES, ROWS = 6, 5, 4


def chain(layers: int = 8) -> nn.Sequential:
    torch.manual_seed(5)
    inner = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers - 1)]
    return nn.Sequential(*inner, nn.Linear(WIDTH, CLASSES))


def samples(number: int, place: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * place + number)
    x = torch.randn(rows, WIDTH, generator=generator)
    return x, torch.randint(CLASSES, (rows,), generator=generator)


def batches(place: int, make: Callable[..., Any] = samples, dtype: torch.dtype = torch.float32) -> Iterator[Any]:
    """Without end: those of the data-parallel rank at this place."""
    number = 0
    while True:
        x, y = make(number, place)
        yield x.to(dtype) if x.is_floating_point() else x, y
        number += 1


class Found(NamedTuple):
    """What a training leaves on a rank."""

    losses: list[float]
    norms: list[float]
    state: dict[str, torch.Tensor]
    seen: Any = None


def json_of(stage: int, ranks: int, micro_batches: int, precision: str = "fp32", **more: Any) -> dict[str, Any]:
    json = config(stage, ranks) | {"gradient_accumulation_steps": micro_batches, "train_micro_batch_size_per_gpu": ROWS}
    json.pop("train_batch_size", None)
    json |= {"bf16": {"enabled": True}} if precision == "bf16" else {}
    return json | {"gradient_clipping": 0.1, **more}


def stepped(
    engine: Any, feed: Iterator[Any], count: int, loss_of: Callable[[Any, Any], torch.Tensor] | None = None
) -> tuple[list[float], list[float]]:
    """Losses and norms of so many steps: of stages, or by `loss_of(engine, batch)` and a backward for each batch."""
    losses, norms = [], []
    for _ in range(count):
        if loss_of is None:
            losses.append(float(engine.train_batch(feed)))
        else:
            total, number = 0.0, engine.gradient_accumulation_steps()
            for _ in range(number):
                loss = loss_of(engine, next(feed))
                engine.backward(loss)
                engine.step()
                total += float(loss.detach())
            losses.append(float(engine.reduce(total / number)))
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def ended(engine: Any, losses: list[float], norms: list[float], state: Any = state_of, seen: Any = None) -> Found:
    """What a training leaves; ends the engine."""
    found = Found(losses, norms, state(engine), seen)
    engine.destroy()
    return found


def pipelined(
    json: dict[str, Any],
    make: Callable[[], nn.Module] = chain,
    steps: int = 3,
    data: Callable[..., Any] = samples,
    loss_fn: Any = F.cross_entropy,
    state: Callable[[Any], dict[str, torch.Tensor]] = state_of,
    watch: Callable[[Any], Any] = bool,
) -> Found:
    engine = zero.initialize(model=make(), config=json, loss_fn=loss_fn)[0]
    dtype = next((param.dtype for param in engine.module.parameters()), torch.float32)
    dtype = torch.bfloat16 if "bf16" in json else dtype
    seen, stream = watch(engine), batches(engine.get_data_parallel_rank(), data, dtype)
    numbers = stepped(engine, stream, steps)
    return ended(engine, *numbers, state, seen() if callable(seen) else seen)


def accumulated(
    json: dict[str, Any],
    make: Callable[[], nn.Module] = chain,
    steps: int = 3,
    data: Callable[..., Any] = samples,
    loss_fn: Any = F.cross_entropy,
    state: Callable[[Any], dict[str, torch.Tensor]] = state_of,
) -> Found:
    """The same by engine(x), engine.backward(loss) and engine.step()."""
    engine = zero.initialize(model=make(), config={key: value for key, value in json.items() if key != "pipeline"})[0]
    stream = batches(dist.get_rank(), data, torch.bfloat16 if "bf16" in json else torch.float32)

    def loss_of(engine: Any, batch: Any) -> torch.Tensor:
        x, y = batch
        return loss_fn(engine(x.to(local_device())), y.to(local_device()))

    return ended(engine, *stepped(engine, stream, steps, loss_of), state)


def compare(found: list[Found], wanted: Found) -> None:
    """All ranks have the norms and losses of the reference and, of the state that is theirs, its bits."""
    names: set[str] = set()
    for each in found:
        torch.testing.assert_close(each.losses, wanted.losses, rtol=1e-6, atol=0)
        assert [name for name, value in each.state.items() if not torch.equal(value, wanted.state[name])] == []
        torch.testing.assert_close(each.norms, wanted.norms, rtol=1e-14, atol=0)  # sums of stages, in fp64
        names |= each.state.keys()
    assert names == wanted.state.keys()
