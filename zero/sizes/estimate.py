"""`zero.estimate`: what an engine will keep on each rank, by kind, stage and placement; no activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

from zero.config import Config, load
from zero.config.optimizers import ARGUMENTS, torch_reason
from zero.kernels.formulas import formats_of
from zero.memory.host_bytes import HostBytes, host_bytes
from zero.plan.formats import ITEMSIZE, Formats, resting_dtype
from zero.plan.memory import alive_nbytes, in_flight_nbytes
from zero.plan.order import Limits, most_whole
from zero.plan.placement import Where, is_updated, place
from zero.plan.sharding import Sharding
from zero.plan.units import UnitPlan, plan_units
from zero.sizes.shape import shape_of

if TYPE_CHECKING:
    from torch import nn

GB = 1e9
DEFAULT = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {}}}
_DEVICE, _HOST, _FILE = Where.DEVICE.value, Where.HOST.value, Where.FILE.value


class Choice(NamedTuple):
    """A stage, and where optimizer state and parameters rest, in the words of the JSON."""

    stage: int
    optimizer: str = _DEVICE
    params: str = _DEVICE

    def __str__(self) -> str:
        places = {_HOST: "host", _FILE: "drive"}
        if self.optimizer == self.params != _DEVICE:
            return f"{self.stage}, optimizer and parameters on {places[self.params]}"
        away = [
            f"{what} on {places[at]}"
            for what, at in (("optimizer", self.optimizer), ("parameters", self.params))
            if at in places
        ]
        return ", ".join([str(self.stage), *away])


CHOICES = (
    *(Choice(stage) for stage in range(4)),
    *(Choice(stage, _HOST) for stage in (1, 2, 3)),
    *(Choice(3, at, at) for at in (_HOST, _FILE)),
)


class DeviceBytes(NamedTuple):
    """The most bytes of each kind on one rank's device during a step. They need not be there at one moment.

    parameters: whole ones, or shards and what stays gathered;
    gradients:  reduced sums, or what micro-batches add up in;
    masters:    exact values of parameters of 16 bits, and copies of shards beside masters;
    moments:    the rest of the optimizer's state;
    gathered:   parameters that are whole while modules use them, and those that travel ahead;
    reduction:  gradients on their way, from autograd and between ranks.
    """

    parameters: int
    gradients: int
    masters: int
    moments: int
    gathered: int
    reduction: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


@dataclass(frozen=True)
class Row:
    """What one choice takes on each rank: on the device that computes, in host memory and in files on a drive."""

    choice: Choice
    device: DeviceBytes
    host: HostBytes


@dataclass(frozen=True)
class Estimate:
    """Rows for all choices of stage and placement, and `configured`, the one that the configuration makes.

    what: the model in words; notes: what was assumed. `print` shows a table in GB (1e9 bytes).
    """

    what: str
    ranks: int
    rows: tuple[Row, ...]
    configured: Row
    notes: tuple[str, ...]

    def __str__(self) -> str:
        kinds = [*DeviceBytes._fields, "device", "host", "drive"]
        width = max(len(str(row.choice)) for row in self.rows) + 2
        lines = [f"GB (1e9 bytes) on each of {self.ranks:,} ranks, without activations; {self.what}", ""]
        lines.append(f"{'stage':<{width}}" + "".join(f"{kind:>12}" for kind in kinds))
        for row in self.rows:
            mark = "* " if row is self.configured else "  "
            cells = [*row.device, row.device.total, row.host.memory, row.host.files]
            lines.append(f"{mark + str(row.choice):<{width}}" + "".join(f"{cell / GB:12,.2f}" for cell in cells))
        return "\n".join([*lines, "", *self.notes])


def estimate(
    model: nn.Module | float,
    config: str | PathLike | Mapping[str, Any] | None = None,
    ranks: int = 1,
    *,
    device: str = "cuda",
    layers: int | None = None,
    width: int | None = None,
) -> Estimate:
    """Bytes on rank 0 of `ranks` data-parallel ranks, by kind, stage and placement.

    Others have the same, but for what moments in fewer bits take, of which a shard of norms and biases has none.

    model: a module, also one on the meta device: nothing is allocated; its leaf modules are marked, as by `initialize`.
    Or a number of parameters, of which a transformer is made, with `layers` and `width` where they are known.
    config: as for `zero.initialize`; default: bf16 and AdamW, stage 0. Its sizes, dtypes and formats hold for all
    rows. device: "cuda", with memory of its own and NCCL, or "cpu", where device and host are one memory.
    Activations are not counted: docs/memory.md says how large they are. Raises ConfigError and ValueError.
    """
    if device not in ("cuda", "cpu"):
        raise ValueError(f"device: got {device!r}, wanted 'cuda' or 'cpu'")
    settings = load(DEFAULT if config is None else config, ranks, filled=False)
    formats, notes = _formats(settings)
    if isinstance(model, int | float):
        shape = shape_of(model, layers, width)
        units = plan_units(shape.tree(), shape.specs(settings.compute_dtype), ranks, (), formats.alignment)
        what = str(shape)
    else:
        units = _units(model, settings, formats)
        what = f"{sum(spec.numel for unit in units for spec in unit.params):,} parameters of {type(model).__name__}"
    section = settings.zero_optimization
    if section.offload_optimizer.ratio == "auto":
        notes.append("offload_optimizer.ratio 'auto' looks at free memory; here all state goes off the device.")
    own = Choice(section.stage, section.offload_optimizer.device, section.offload_param.device)
    rows = {choice: _row(units, settings, formats, device, choice) for choice in dict.fromkeys([*CHOICES, own])}
    what += f", in {settings.compute_dtype} with {settings.optimizer.type if settings.optimizer else 'Adam'}"
    return Estimate(what, ranks, tuple(rows.values()), rows[own], tuple(notes))


def _formats(settings: Config) -> tuple[Formats, list[str]]:
    """How the optimizer's state is kept, and what was assumed of it."""
    section = settings.optimizer
    if section is None:
        return Formats(), ["The configuration names no optimizer: counted are fp32 masters and two fp32 moments."]
    if (reason := torch_reason(section.type, section.params)) is not None:
        text = f"{section.type} runs as torch's own class ({reason}): counted are fp32 masters and two fp32 moments."
        return Formats(), [text]
    kind = section.type.lower()
    return formats_of(kind, ARGUMENTS[kind].model_validate(section.params), settings.compute_dtype), []


def _units(model: nn.Module, settings: Config, formats: Formats) -> tuple[UnitPlan, ...]:
    from torch import nn

    from zero.core.leaf import mark_leaf_modules
    from zero.core.sharded_module import plan_module

    if not isinstance(model, nn.Module):
        raise ValueError(f"model: got a {type(model).__name__}, wanted a torch.nn.Module or a number of parameters")
    leaf = settings.zero_optimization.leaf_module
    mark_leaf_modules(model, leaf.classes, leaf.names, leaf.name_suffixes, "classes" in leaf.model_fields_set)
    groups = [[param for param in model.parameters() if param.requires_grad]]
    return plan_module(model, groups, settings.world_size, settings, formats.alignment)


def _row(units: Sequence[UnitPlan], settings: Config, formats: Formats, device: str, choice: Choice) -> Row:
    section, zero, mirrored = settings.zero_optimization, settings.zero, device != "cpu"
    sharding = Sharding.of_stage(choice.stage, zero.reduce_every_micro_batch or zero.reduce == "tree")
    parts = (settings.shard_size or settings.world_size) if sharding.optim else 1
    replicas, accumulation = settings.world_size // parts, settings.gradient_accumulation_steps
    accumulate, travel = settings.data_types.grad_accum_dtype or "fp32", settings.communication_data_type
    state, params, limits = section.offload_optimizer, section.offload_param, Limits.of_section(section)
    ratio = 1.0 if state.ratio == "auto" else state.ratio
    placements = place(units, parts, Where(choice.optimizer), Where(choice.params), ratio, params.max_in_cpu)
    collected = accumulation > 1 and not sharding.grads
    trained = [unit.name for unit in units if is_updated(unit)]

    def alive(formats: Formats) -> Any:
        return alive_nbytes(
            units,
            sharding,
            parts,
            formats=formats,
            local_gradients=trained if collected else (),
            reduced_gradients=() if collected else trained,
            accumulation=accumulation,
            accumulate=accumulate,
            limits=limits,
            placements=placements,
            mirrored=mirrored,
            secondary=settings.secondary_shard_size,
        )

    held, masters = alive(formats), alive(formats._replace(states=0)).optimizer
    gathered = 0
    if sharding.params and (parts > 1 or choice.params != _DEVICE):
        sizes = [sum(spec.numel for spec in unit.params) for unit in units]
        whole = [ITEMSIZE[unit.dtype] * unit.layout.numel for unit in units]
        gathered = most_whole([unit.anchor for unit in units], sizes, whole, limits)
    reduction = in_flight_nbytes(
        units, parts, replicas, accumulate=accumulate, travel=travel, collected=collected, native=mirrored
    )
    rounded = accumulation == 1 and (settings.world_size == 1 or mirrored) and zero.reduce != "tree" and travel is None
    resting = resting_dtype(settings.compute_dtype, accumulate, rounded)
    buffers = state.buffer_count, params.buffer_count
    host = host_bytes(units, placements, 0, parts, formats, resting, mirrored, *buffers)
    moments = held.optimizer - masters
    return Row(choice, DeviceBytes(held.parameters, held.gradients, masters, moments, gathered, reduction), host)
