"""One training of a small model under the engine, and the record that it leaves: what most tests of the engine ask.

`scenario(pool, model, json, world, ...)` trains on `world` ranks and gives a `Record` of each; `run(model, json, ...)`
is the same on the rank that calls it. A model is a name in `MODELS`, or anything that builds one. The JSON is a stage,
or sections as users write them, in which short words stand for the usual: see `settings`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from device import moved
from models import WIDE, TiedNet, batch, config, make_net, share
from torch import nn

import zero
from zero.core.comm import local_device
from zero.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

Json = int | dict[str, Any]
Inputs = tuple[Any, ...]


class Model(NamedTuple):
    """make: builds it with the same weights each time; inputs(number, part): of one micro-batch of two samples."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], Inputs] = lambda number, part: batch(1000 * part + number, 2)


def seeded(make: Callable[[], nn.Module], seed: int = 3) -> Callable[[], nn.Module]:
    """`make` after a seed."""

    def build() -> nn.Module:
        torch.manual_seed(seed)
        return make()

    return build


MODELS: dict[str, Model] = {
    "net": Model(make_net),  # a language model with the sizes of a toy
    "dealt": Model(make_net, lambda number, part: share(number)),  # on what oracle.py deals to the ranks
    "wide": Model(lambda: make_net(width=WIDE)),  # matrices that are large enough for moments in 8 bits
    "tied": Model(seeded(TiedNet)),  # tied, frozen, and with a buffer
}


@dataclasses.dataclass
class Record:
    """What a training leaves on a rank; tensors are on the host.

    losses: of the rank's micro-batches; norms: after each step of the optimizer, None where none was computed;
    weights: whole parameters as forward sees them; exact: whole fp32 values; moments: the optimizer's whole states by
    key, then by parameter; both where `state=True` was asked; skipped: steps; seen: what `watch` returned;
    steps: of the engine, at the end.
    """

    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float | None] = dataclasses.field(default_factory=list)
    weights: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    exact: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    moments: dict[str, dict[str, torch.Tensor]] = dataclasses.field(default_factory=dict)
    skipped: int = 0
    seen: list[Any] = dataclasses.field(default_factory=list)
    steps: int = 0


def settings(json: Json, world: int, **more: Any) -> dict[str, Any]:
    """The whole JSON of a stage, or of sections with these words beside those of users.

    stage: `zero_optimization.stage`; precision: "fp32", "bf16" or "fp16"; cut: nothing stays whole at stage 3;
    accumulation, micro: of the batch. Whatever else `zero_optimization` knows may stand in "section".
    """
    given = {"stage": json} if isinstance(json, int) else dict(json)
    given |= more
    stage, section = given.pop("stage", 0), given.pop("section", {})
    if (precision := given.pop("precision", "fp32")) != "fp32":
        given[precision] = {"enabled": True}
    made = config(stage, world, micro=given.pop("micro", 2), accumulation=given.pop("accumulation", 1))
    if given.pop("cut", False):
        section = {"stage3_param_persistence_threshold": 0, **section}
    made["zero_optimization"] |= section
    return made | given


def run(
    model: str | Callable[[], nn.Module] | Model,
    json: Json,
    steps: int = 3,
    *,
    loop: Callable[[Any, int, Inputs], torch.Tensor] | None = None,
    watch: Callable[[Any, int], Any] | None = None,
    parts: int = 0,
    load: str = "",
    save: str = "",
    state: bool = False,
    first: int = 0,
    keep: Callable[[Any], Any] | None = None,
    **more: Any,
) -> Record:
    """Train on this rank for `steps` steps of the optimizer.

    loop(engine, number, inputs): forward and backward of one micro-batch, and its loss; watch(engine, number): called
    after each `engine.step()`, what it returns is seen; parts: micro-batches of a step over all ranks, the same ones
    on any number of ranks, 0 for the JSON's accumulation on each; load, save: folders of checkpoints; first: the
    number of the first step; keep(engine): called at the end, before the engine ends, what it returns is seen last.
    """
    made = model if isinstance(model, Model) else MODELS[model] if isinstance(model, str) else Model(seeded(model))
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    whole = settings(json, world, **more) if not parts else settings(json, world, accumulation=parts // world, **more)
    engine, *_ = zero.initialize(model=made.make(), config=whole)
    found = Record()
    if load:
        engine.load_checkpoint(load)
    each = whole["gradient_accumulation_steps"]
    for number in range(first * each, (first + steps) * each):
        step, turn = divmod(number, each)
        at, part = (parts * step + turn * world + rank, 0) if parts else (number, rank)
        inputs = moved(made.inputs(at, part), local_device())
        if loop:
            loss = loop(engine, number, inputs)
        else:
            engine.backward(loss := engine(*inputs))
        found.losses.append(loss.item())
        engine.step()
        if turn == each - 1:
            found.norms.append(engine.get_global_grad_norm())
        if watch:
            found.seen.append(watch(engine, number))
    if save:
        engine.save_checkpoint(save)
    if keep:
        found.seen.append(keep(engine))
    found.skipped, found.steps = engine.skipped_steps, engine.global_steps
    named = dict(engine.module.named_parameters())
    if state:
        trained = {name: param for name, param in named.items() if param.requires_grad}
        found.exact = {name: safe_get_full_fp32_param(param).cpu() for name, param in trained.items()}
        found.moments = {key: _states(trained, key) for key in ("exp_avg", "exp_avg_sq", "momentum_buffer")}
    engine.destroy()
    found.weights = {name: param.detach().cpu().clone() for name, param in named.items()}
    return found


def _states(named: dict[str, nn.Parameter], key: str) -> dict[str, torch.Tensor]:
    """The whole state of the parameters that have one of this key."""
    found = {}
    for name, param in named.items():
        with contextlib.suppress(ValueError):  # an unknown key, on all ranks
            found[name] = safe_get_full_optimizer_state(param, key).cpu()
    return found


def runs(cases: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Record]:
    """Several on this rank, one after the other."""
    return [run(*args, **kwargs) for args, kwargs in cases]


def scenario(pool: Any, model: Any, json: Json, world: int = 2, steps: int = 3, **more: Any) -> list[Record]:
    """Train on `world` ranks; the records, by rank. What is called there must stand at the top of a module."""
    return pool.run(world, run, model, json, steps, **more)


def same(one: Record, other: Record, *what: str) -> bool:
    """Whether two records have the same bits in these fields: losses, norms and weights where none is named."""
    return not differences(one, other, *what)


def differences(one: Record, other: Record, *what: str) -> list[str]:
    """Where the bits of two records differ: names of fields, with those of parameters."""
    found = []
    for field in what or ("losses", "norms", "weights"):
        a, b = getattr(one, field), getattr(other, field)
        if isinstance(b, dict):
            found += [f"{field} {name}" for name in b if not _equal(a[name], b[name])]
        elif repr(a) != repr(b):  # a NaN is one
            found.append(field)
    return found


def _equal(a: Any, b: Any) -> bool:
    if isinstance(b, dict):
        return all(torch.equal(a[name], b[name]) for name in b)
    return torch.equal(a, b)
