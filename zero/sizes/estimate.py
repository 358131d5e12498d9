"""The memory of an engine on each rank, by kind, for each choice of stage, placement and mesh: `zero.estimate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

from zero.config import Config, load
from zero.config.optimizers import ARGUMENTS, MuonParams, torch_reason
from zero.config.sections import Optimizer
from zero.kernels.formulas import formats_of
from zero.plan.formats import Formats, wire_alignment
from zero.plan.layout import ALIGNMENT
from zero.plan.memory import SLOTS, HostBytes, InFlight, KindBytes, Scheme, alive_nbytes, host_bytes, in_flight_nbytes
from zero.plan.pipeline import Schedule
from zero.plan.placement import is_updated
from zero.plan.units import UnitPlan, plan_units
from zero.sizes.choice import CHOICES, StageChoice, own_choice, scheme_of
from zero.sizes.cost import LOSS
from zero.sizes.lines import gigabytes, of_each, table_lines, wrapped
from zero.sizes.links import Links
from zero.sizes.shape import Shape, shape_of
from zero.sizes.step_time import Prediction

if TYPE_CHECKING:
    from torch import nn

    from zero.sizes.cut_layers import CutCopy

GB = 1e9
STEP = "<step>"
TP, EP = "tensor_parallel.autotp_size", "expert_parallel.autoep_size"
_MUON_OF_SHAPE = ({"use_muon": True}, {"use_muon": False})  # the groups that `units_of` makes
DEFAULT = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {}}}


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


_NOTHING = Links()
_STATE = DeviceBytes._fields[:-2]  # kinds that are there without a micro-batch


@dataclass(frozen=True)
class PlanRow:
    """The bytes of one choice on each rank: on the device that computes, in host memory and in files on a drive.

    moments: bytes of state on the device while the backward of a unit's module runs, by the path of that, in the order
        of the backward, with `LOSS` before and the step, `STEP`, behind it. Activations are not in them.
    ends: the most until that backward has ended and the unit's gradient has left, by the same paths.

    The rest says what zero/tools/plan/search.py has found for a micro-batch:

    policy:      of recomputation; as in `ModelCost.peak`;
    micro_batch, accumulation: samples of one forward of one rank, 0 for none, and how many of these make a step;
    inputs_on_host: bytes of activations in host memory;
    peak:        the most bytes on the device at one moment, activations included;
    links:       bytes that one rank sends in a step, and the seconds that one has, predicted;
    lacks:       what there is too little of, in words; empty where it fits;
    sets:        the keys of the JSON, with dots, that make a run this one.
    """

    choice: StageChoice
    device: DeviceBytes
    host: HostBytes
    moments: Mapping[str, int]
    ends: Mapping[str, int]
    policy: str = "none"
    micro_batch: int = 0
    accumulation: int = 1
    inputs_on_host: float = 0.0
    peak: float = 0.0
    links: Links = _NOTHING
    step: Prediction | None = None
    lacks: tuple[str, ...] = ()
    sets: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Estimate:
    """Rows for all choices of stage and placement, and `configured`, the one that the configuration makes.

    what: the model in words; notes: what was assumed. `print` shows tables in GB (1e9 bytes).
    """

    what: str
    ranks: int
    rows: tuple[PlanRow, ...]
    configured: PlanRow
    notes: tuple[str, ...]

    def __str__(self) -> str:
        labels = [f"{'* ' if row is self.configured else '  '}{row.choice}" for row in self.rows]
        kinds = {
            "device": [row.device.total for row in self.rows],
            "host": [row.host.memory for row in self.rows],
            "drive": [row.host.files for row in self.rows],
            **{kind: [getattr(row.device, kind) for row in self.rows] for kind in _STATE},
        }
        texts = {kind: [gigabytes(nbytes) for nbytes in each] for kind, each in kinds.items()}
        first = f"GB (1e9 bytes) on {of_each(self.ranks)}, without activations; {self.what}"
        return wrapped("\n".join([first, "", *table_lines("stage", labels, texts), "", *self.notes]))


def estimate(
    model: nn.Module | float,
    config: str | PathLike | Mapping[str, Any] | None = None,
    ranks: int = 1,
    *,
    device: str = "cuda",
    layers: int | None = None,
    width: int | None = None,
) -> Estimate:
    """Bytes on rank 0 of `ranks` ranks, by kind, stage and placement; in a pipeline, on the rank that has the most.

    Others have the same, but for what moments in fewer bits take, of which a shard of norms and biases has none, and of
    layers that are cut over ranks, of which rank 0 has the most. Notes say what is cut or divided, and how.

    model: a module, also one on the meta device: nothing is allocated; its leaf modules are marked, as by `initialize`.
    Or a number of parameters, of which a transformer is made, with `layers` and `width` where they are known.
    config: as for `zero.initialize`; default: bf16 and AdamW, stage 0. Its sizes, dtypes and formats hold for all
    rows. device: "cuda", with memory of its own and NCCL, or "cpu", where device and host are one memory.
    Activations are not counted: docs/memory.md says how large they are. Raises ConfigError and ValueError.
    """
    if device not in ("cuda", "cpu"):
        raise ValueError(f"device: got {device!r}, wanted 'cuda' or 'cpu'")
    settings = load(DEFAULT if config is None else config, ranks, filled=False)
    if isinstance(model, int | float):
        model = shape_of(model, layers, width)
        what = str(model)
    cut = _cut(model, settings) if settings.grid.size("tp") > 1 or settings.grid.size("ep") > 1 else None
    model = model if cut is None else cut.module
    formats, notes = state_formats(model, settings)
    units = units_of(model, settings, formats.alignment)
    parts = [units]
    if settings.grid.size("pp") > 1:
        parts, schedule = _of_places(model, units, settings)
        once = "whole for the step" if settings.pipeline.gather == "step" else "gathered for each use"
        notes.append(
            f"{schedule.style} of {schedule.micro_batches} micro-batches: bubble {100 * schedule.bubble():.1f} %, at "
            f"most {schedule.alive(0)} alive on the first rank; parameters and gradients of a stage: {once}. Bytes are "
            "those of the stage that has the most."
        )
    if not isinstance(model, Shape):
        numel = sum(spec.full_numel for unit in units for spec in unit.params)
        what = f"{numel:,} parameters of {type(model).__name__}"
    section = settings.zero_optimization
    notes += () if cut is None else cut.text()
    if section.offload_optimizer.ratio == "auto":
        notes.append("offload_optimizer.ratio 'auto' looks at free memory; here all state goes off the device.")
    if section.offload_optimizer.zero.update == "auto" and device != "cpu":
        notes.append("offload_optimizer.zero.update 'auto' looks at rates; here it is 'gpu', which takes more there.")
    own = own_choice(settings)
    choices = (choice._replace(shard_size=own.shard_size if choice.stage else 0) for choice in CHOICES)
    rows = {}
    for choice in dict.fromkeys([*choices, own]):
        each = []
        for here in parts:
            scheme = scheme_of(here, settings, choice, formats, settings.gradient_accumulation_steps, device != "cpu")
            each.append(state_row(here, settings, scheme, choice))
        rows[choice] = max(each, key=lambda row: row.device.total)
    dtypes = " and ".join(dict.fromkeys(unit.dtype for unit in units)) or settings.compute_dtype
    what += f", in {dtypes} with {settings.optimizer.type if settings.optimizer else 'Adam'}"
    return Estimate(what, ranks, tuple(rows.values()), rows[own], tuple(notes))


def state_formats(model: nn.Module | Shape, settings: Config) -> tuple[Formats, list[str]]:
    """How the optimizer's state is kept, and what was assumed of it. Raises ValueError."""
    section = settings.optimizer
    if section is None:
        return Formats(), ["The configuration names no optimizer: counted are fp32 masters and two fp32 moments."]
    if (reason := torch_reason(section.type, section.params)) is not None:
        text = f"{section.type} runs as torch's own class ({reason}): counted are fp32 masters and two fp32 moments."
        return Formats(), [text]
    kind = section.type.lower()
    params, groups = ARGUMENTS[kind].model_validate(section.params), ()
    if kind == "muon":
        groups = _MUON_OF_SHAPE if isinstance(model, Shape) else _groups(model, settings)
    rows = ["NorMuon's mean squares of rows are not counted."] if getattr(params, "beta2", None) is not None else []
    return formats_of(kind, params, settings.compute_dtype, groups), rows


def _groups(model: nn.Module, settings: Config) -> list[dict[str, Any]]:
    """The parameter groups that an engine makes of all parameters that are trained."""
    groups, section = [{"params": [param for param in model.parameters() if param.requires_grad]}], settings.optimizer
    if section is None or section.type.lower() != "muon":
        return groups
    from zero.optim.muon_groups import muon_groups

    return muon_groups(model, groups, MuonParams.model_validate(section.params))


def is_fused(section: Optimizer | None) -> bool:
    """Whether our kernels alone are the update, as they are where nothing else is said."""
    return section is None or (section.type.lower() != "lamb" and torch_reason(section.type, section.params) is None)


def units_of(model: nn.Module | Shape, settings: Config, alignment: int = ALIGNMENT) -> tuple[UnitPlan, ...]:
    """The units that an engine makes of it; the leaf modules of a module are marked. Raises ValueError."""
    if isinstance(model, Shape):
        specs = model.specs(settings.compute_dtype)
        if settings.optimizer is not None and settings.optimizer.type.lower() == "muon":
            specs = [spec._replace(group=0 if spec.ndim == 2 and "blocks" in spec.name else 1) for spec in specs]
        alignment = wire_alignment(alignment, settings.zero_optimization)
        return plan_units(model.tree(), specs, settings.summed, settings.zero.units, alignment)
    from torch import nn

    from zero.core.leaf import mark_leaf_modules
    from zero.core.sharded_module import plan_module

    if not isinstance(model, nn.Module):
        raise ValueError(f"model: got a {type(model).__name__}, wanted a torch.nn.Module or a number of parameters")
    leaf = settings.zero_optimization.leaf_module
    mark_leaf_modules(model, leaf.classes, leaf.names, leaf.name_suffixes, "classes" in leaf.model_fields_set)
    groups = [group["params"] for group in _groups(model, settings)]
    return plan_module(model, groups, settings.grid.world, settings, alignment)


def _cut(model: nn.Module | Shape, settings: Config) -> CutCopy:
    """What rank 0 has of a model whose layers are cut. Raises ValueError where an engine would."""
    key = TP if settings.grid.size("tp") > 1 else EP
    if isinstance(model, Shape):
        raise ValueError(f"{key}: of a number of parameters no layers are known; give a model")
    if (pp := settings.grid.size("pp")) > 1:
        raise ValueError(f"{key}: is not planned together with pipeline.stages {pp}; leave one of the two out")
    from zero.sizes.cut_layers import CutCopy

    return CutCopy(model, settings)


def _of_places(
    model: nn.Module | Shape, units: Sequence[UnitPlan], settings: Config
) -> tuple[list[list[UnitPlan]], Schedule]:
    """The units of each rank along pp, and its schedule; a unit that several stages read is on each of them."""
    if isinstance(model, Shape):
        raise ValueError("pipeline.stages: of a number of parameters no layers are known; give a model")
    from zero.parallel.pipeline.partition import divide
    from zero.parallel.pipeline.schedule import of_section

    section, schedule = settings.pipeline, of_section(settings)
    stage_of = divide(model, len(schedule.places), section.partition, section.stage_map)
    found: list[list[UnitPlan]] = [[] for _ in schedule.orders]
    for unit in units:
        names = [spec.name for spec in unit.params]
        stages = {stage for at, stage in stage_of.items() for name in names if f"{name}.".startswith(f"{at}.")}
        for place in sorted({schedule.places[stage] for stage in stages}):
            found[place].append(unit)
    return found, schedule


def state_row(units: Sequence[UnitPlan], settings: Config, scheme: Scheme, choice: StageChoice) -> PlanRow:
    """What a choice takes, which means this scheme, without activations."""
    section = settings.zero_optimization
    trained = [unit.name for unit in units if is_updated(unit)]
    local, reduced = (trained, ()) if scheme.collected else ((), trained)
    kept = alive_nbytes(units, scheme, local_gradients=local, reduced_gradients=reduced)
    each, moving = scheme.held(units), in_flight_nbytes(units, scheme)
    host = host_bytes(each, section.offload_optimizer.buffer_count, section.offload_param.buffer_count)
    streamed = (held.away for held, at in zip(each, scheme.placements, strict=True) if at.streamed)
    slot = max(streamed, key=lambda away: away.record, default=KindBytes())
    device = DeviceBytes(
        kept.parameters,
        kept.gradients,
        kept.masters + SLOTS * slot.masters,
        kept.moments + SLOTS * slot.moments,
        gathered=max((use.whole for use in scheme.uses), default=0),
        reduction=max((each.most for each in moving), default=0),
    )
    return PlanRow(choice, device, host, *_moments(units, scheme, device, moving))


def _moments(
    units: Sequence[UnitPlan], scheme: Scheme, device: DeviceBytes, on_their_way: Sequence[InFlight]
) -> tuple[dict[str, int], dict[str, int]]:
    """See `PlanRow`. Gradients are there from the start where earlier micro-batches, or the last step, left memory.

    A sum that is a shard takes memory when its messages have come, one unit later.
    """
    rest = device.parameters + device.masters + device.moments
    here = [is_updated(unit) and at.used_on_device for unit, at in zip(units, scheme.placements, strict=True)]
    whole = sum(unit.layout.numel for unit, counts in zip(units, here, strict=True) if counts or scheme.collected)
    back = scheme.uses[len(units) :]
    earlier = device.gradients if scheme.accumulation > 1 or scheme.parts == 1 else 0
    found, ends, reduced, latest = {LOSS: rest + earlier + (back[0].whole if back else 0)}, dict[str, int](), 0, 0
    for use in back:
        unit, travels = units[use.unit], on_their_way[use.unit]
        now = rest + (earlier or device.gradients * reduced // max(1, whole)) + use.whole
        for table, nbytes in ((found, travels.during), (ends, travels.most)):
            table[unit.anchor] = max(now + nbytes, table.get(unit.anchor, 0))
        reduced, latest = reduced + latest, unit.layout.numel if here[use.unit] else 0
    return found | {STEP: rest + device.gradients}, ends
