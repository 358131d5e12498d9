"""What an engine will keep on each rank, by kind, for each choice of stage, placement and mesh: `zero.estimate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from zero.config import Config, load
from zero.config.optimizers import ARGUMENTS, torch_reason
from zero.kernels.formulas import formats_of
from zero.memory.host_bytes import HostBytes, host_bytes
from zero.plan.formats import ITEMSIZE, Formats, resting_dtype
from zero.plan.memory import alive_nbytes, in_flight_nbytes
from zero.plan.order import Limits, uses
from zero.plan.placement import Where, is_updated, place
from zero.plan.sharding import Sharding
from zero.plan.units import UnitPlan, plan_units
from zero.sizes.links import Links
from zero.sizes.shape import Shape, shape_of
from zero.sizes.timeline import Prediction

if TYPE_CHECKING:
    from torch import nn

GB = 1e9
DEFAULT = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {}}}
_DEVICE, _HOST, _FILE = Where.DEVICE.value, Where.HOST.value, Where.FILE.value


class Choice(NamedTuple):
    """A stage, where optimizer state and parameters rest, in the words of the JSON, and the mesh.

    shard_size: ranks that state is cut over (`zero.shard_size`), 0 for all; secondary: those that hold a second copy of
    the parameters (`zero_hpz_partition_size`), 1 for none.
    """

    stage: int
    optimizer: str = _DEVICE
    params: str = _DEVICE
    shard_size: int = 0
    secondary: int = 1

    def __str__(self) -> str:
        places = {_HOST: "host", _FILE: "drive"}
        if self.optimizer == self.params != _DEVICE:
            away = [f"optimizer and parameters on {places[self.params]}"]
        else:
            away = [
                f"{what} on {places[at]}"
                for what, at in (("optimizer", self.optimizer), ("parameters", self.params))
                if at in places
            ]
        mesh = [f"HSDP {self.shard_size}"] if self.shard_size else []
        mesh += [f"hpZ {self.secondary}"] if self.secondary > 1 else []
        return ", ".join([str(self.stage), *away, *mesh])


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
    reduction:  gradients on their way, from autograd and between ranks;
    activations, logits: where a micro-batch is planned: what blocks keep and work with, and what head and loss do.
    """

    parameters: int
    gradients: int
    masters: int
    moments: int
    gathered: int
    reduction: int
    activations: int = 0
    logits: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


_STATE = DeviceBytes._fields[:-2]  # kinds that are there without a micro-batch


@dataclass(frozen=True)
class Row:
    """What one choice takes on each rank: on the device that computes, in host memory and in files on a drive.

    moments: bytes of state on the device while the backward of a unit's module runs, by the path of that, in the order
        of the backward; "" is also the step that follows. Activations are not in them.

    The rest says what zero/sizes/search.py has found for a micro-batch:

    policy:      of recomputation; as in `ModelCost.peak`;
    micro_batch, accumulation: samples of one forward of one rank, 0 for none, and how many of these make a step;
    inputs_on_host: bytes of activations in host memory;
    peak:        the most bytes on the device at one moment, activations included;
    links:       bytes that one rank sends in a step, and the seconds that one has, predicted;
    lacks:       what there is too little of, in words; empty where it fits;
    sets:        what it sets in the JSON, by key with dots.
    """

    choice: Choice
    device: DeviceBytes
    host: HostBytes
    moments: Mapping[str, int]
    policy: str = "none"
    micro_batch: int = 0
    accumulation: int = 1
    inputs_on_host: float = 0.0
    peak: float = 0.0
    links: Links = Links()
    step: Prediction | None = None
    lacks: tuple[str, ...] = ()
    sets: Mapping[str, Any] = MappingProxyType({})

    def overrides(self) -> dict[str, Any]:
        """The keys of the JSON, with dots, that make a run this one."""
        return dict(self.sets)


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
        kinds = [*_STATE, "device", "host", "drive"]
        width = max(len(str(row.choice)) for row in self.rows) + 2
        lines = [f"GB (1e9 bytes) on each of {self.ranks:,} ranks, without activations; {self.what}", ""]
        lines.append(f"{'stage':<{width}}" + "".join(f"{kind:>12}" for kind in kinds))
        for row in self.rows:
            mark = "* " if row is self.configured else "  "
            cells = [*row.device[: len(_STATE)], row.device.total, row.host.memory, row.host.files]
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
    formats, notes = state_formats(settings)
    if isinstance(model, int | float):
        model = shape_of(model, layers, width)
        what = str(model)
    units = units_of(model, settings, formats)
    if not isinstance(model, Shape):
        what = f"{sum(spec.numel for unit in units for spec in unit.params):,} parameters of {type(model).__name__}"
    section = settings.zero_optimization
    if section.offload_optimizer.ratio == "auto":
        notes.append("offload_optimizer.ratio 'auto' looks at free memory; here all state goes off the device.")
    own = own_choice(settings)
    choices = (choice._replace(shard_size=own.shard_size if choice.stage else 0) for choice in CHOICES)
    accumulation = settings.gradient_accumulation_steps
    rows = {
        choice: state_row(units, settings, formats, device != "cpu", choice, accumulation)
        for choice in dict.fromkeys([*choices, own])
    }
    what += f", in {settings.compute_dtype} with {settings.optimizer.type if settings.optimizer else 'Adam'}"
    return Estimate(what, ranks, tuple(rows.values()), rows[own], tuple(notes))


def own_choice(settings: Config) -> Choice:
    """The one that the configuration makes."""
    section = settings.zero_optimization
    places = section.offload_optimizer.device, section.offload_param.device
    return Choice(section.stage, *places, settings.shard_size, settings.secondary_shard_size)


def state_formats(settings: Config) -> tuple[Formats, list[str]]:
    """How the optimizer's state is kept, and what was assumed of it."""
    section = settings.optimizer
    if section is None:
        return Formats(), ["The configuration names no optimizer: counted are fp32 masters and two fp32 moments."]
    if (reason := torch_reason(section.type, section.params)) is not None:
        text = f"{section.type} runs as torch's own class ({reason}): counted are fp32 masters and two fp32 moments."
        return Formats(), [text]
    kind = section.type.lower()
    return formats_of(kind, ARGUMENTS[kind].model_validate(section.params), settings.compute_dtype), []


def units_of(model: nn.Module | Shape, settings: Config, formats: Formats) -> tuple[UnitPlan, ...]:
    """The units that an engine makes of it; the leaf modules of a module are marked. Raises ValueError."""
    if isinstance(model, Shape):
        specs = model.specs(settings.compute_dtype)
        return plan_units(model.tree(), specs, settings.world_size, (), formats.alignment)
    from torch import nn

    from zero.core.leaf import mark_leaf_modules
    from zero.core.sharded_module import plan_module

    if not isinstance(model, nn.Module):
        raise ValueError(f"model: got a {type(model).__name__}, wanted a torch.nn.Module or a number of parameters")
    leaf = settings.zero_optimization.leaf_module
    mark_leaf_modules(model, leaf.classes, leaf.names, leaf.name_suffixes, "classes" in leaf.model_fields_set)
    groups = [[param for param in model.parameters() if param.requires_grad]]
    return plan_module(model, groups, settings.world_size, settings, formats.alignment)


class Scheme(NamedTuple):
    """How a choice cuts state, and how gradients add up.

    parts, replicas: sizes of the shard and the replica axis; collected: micro-batches add up in whole buffers first;
    accumulate, resting: dtypes of sums, on the device and off it; travel: of gradients between ranks, None for their
    own; mirrored: the device is not the host.
    """

    sharding: Sharding
    parts: int
    replicas: int
    collected: bool
    accumulate: str
    resting: str
    travel: str | None
    limits: Limits
    placements: Sequence[Placement]
    mirrored: bool


def scheme_of(
    units: Sequence[UnitPlan], settings: Config, mirrored: bool, choice: Choice, accumulation: int
) -> Scheme:
    """What a choice makes of the settings."""
    section, zero = settings.zero_optimization, settings.zero
    sharding = Sharding.of_stage(choice.stage, zero.reduce_every_micro_batch or zero.reduce == "tree")
    parts = (choice.shard_size or settings.world_size) if sharding.optim else 1
    accumulate, travel = settings.data_types.grad_accum_dtype or "fp32", settings.communication_data_type
    state, params = section.offload_optimizer, section.offload_param
    ratio = 1.0 if state.ratio == "auto" else state.ratio
    placements = place(units, parts, Where(choice.optimizer), Where(choice.params), ratio, params.max_in_cpu)
    rounded = accumulation == 1 and (settings.world_size == 1 or mirrored) and zero.reduce != "tree" and travel is None
    return Scheme(
        sharding,
        parts,
        settings.world_size // parts,
        accumulation > 1 and not sharding.grads,
        accumulate,
        resting_dtype(settings.compute_dtype, accumulate, rounded),
        travel,
        Limits.of_section(section),
        placements,
        mirrored,
    )


def state_row(
    units: Sequence[UnitPlan], settings: Config, formats: Formats, mirrored: bool, choice: Choice, accumulation: int
) -> Row:
    """What the choice takes with so many micro-batches for a step, without activations. mirrored: as in `Scheme`."""
    section, scheme = settings.zero_optimization, scheme_of(units, settings, mirrored, choice, accumulation)
    parts, collected = scheme.parts, scheme.collected
    trained = [unit.name for unit in units if is_updated(unit)]

    def alive(formats: Formats) -> Any:
        return alive_nbytes(
            units,
            scheme.sharding,
            parts,
            formats=formats,
            local_gradients=trained if collected else (),
            reduced_gradients=() if collected else trained,
            accumulation=accumulation,
            accumulate=scheme.accumulate,
            limits=scheme.limits,
            placements=scheme.placements,
            mirrored=mirrored,
            secondary=choice.secondary,
        )

    held, masters = alive(formats), alive(formats._replace(states=0)).optimizer
    whole = [use.whole for use in uses_of(units, scheme)] if scheme_cuts(scheme, choice) else [0] * 2 * len(units)
    on_their_way = in_flight_nbytes(
        units,
        parts,
        scheme.replicas,
        accumulate=scheme.accumulate,
        travel=scheme.travel,
        collected=collected,
        native=mirrored,
    )
    buffers = section.offload_optimizer.buffer_count, section.offload_param.buffer_count
    host = host_bytes(units, scheme.placements, 0, parts, formats, scheme.resting, mirrored, *buffers)
    device = DeviceBytes(
        held.parameters,
        held.gradients,
        masters,
        held.optimizer - masters,
        max(whole, default=0),
        max(on_their_way, default=0),
    )
    return Row(choice, device, host, _moments(units, scheme, device, whole, on_their_way, accumulation))
