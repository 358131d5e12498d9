"""The search of `zero plan`: rows over stage, placement, mesh, recomputation and micro-batch, the best first."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from zero.config import Config
from zero.config.unavailable import lookup
from zero.memory.update_costs import RESERVE, UpdateRates, update_costs
from zero.plan.formats import Formats, wire_alignment
from zero.plan.memory import COMMUNICATOR, Scheme, communicators
from zero.plan.units import UnitPlan
from zero.sizes.choice import CHOICES, FILE, StageChoice, own_choice, scheme_of
from zero.sizes.choice import DEVICE as DEVICE_MEMORY
from zero.sizes.cost import LOSS, POLICIES, ModelCost, UnitCost
from zero.sizes.estimate import GB, STEP, PlanRow, is_fused, state_formats, state_row, units_of
from zero.sizes.links import Links, Moves, over, sum_of
from zero.sizes.rates import Rates
from zero.sizes.shape import Shape
from zero.sizes.step_time import DEVICE, DRIVE, HOST, LINK, Pace, Prediction, UnitTimes, predict

if TYPE_CHECKING:
    from torch import nn

USABLE = 0.92  # of the device's memory: torch, CUDA and what the allocator cannot use take the rest; NCCL takes more
_ALIKE = 1.01
_SIZES = 4  # micro-batches of each row, the largest that fit
_STEPS = 2, 4  # that are simulated: without state off the device, whose updates reach into the next step, and with


@dataclass(frozen=True)
class Setup:
    """What a plan is made for: a model and what it costs, the configuration, and machines.

    settings: of a world whose ranks may share sequences; per_host: ranks on each host; mirrored: whether the device has
    memory of its own and NCCL, or is the host.
    """

    model: nn.Module | Shape
    cost: ModelCost
    settings: Config
    rates: Rates
    per_host: int = 8
    mirrored: bool = True

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.settings.summed

    def on(self, ranks: int) -> Setup:
        """The same with so many ranks, which change the layout of a unit only."""
        data = {"world_size": ranks // self.settings.sequence_parallel_size}
        other = replace(self, settings=self.settings.model_copy(update=data))
        alignment = wire_alignment(self.formats.alignment, self.settings.zero_optimization)
        other.__dict__["units"] = tuple(unit.on(ranks, alignment) for unit in self.units)
        return other

    @cached_property
    def formats(self) -> Formats:
        """Of the optimizer's state."""
        return state_formats(self.model, self.settings)[0]

    @cached_property
    def units(self) -> tuple[UnitPlan, ...]:
        """As an engine makes them."""
        return units_of(self.model, self.settings, self.formats.alignment)

    @property
    def dtype(self) -> str:
        """That the forward computes in."""
        return self.settings.autocast_dtype or self.settings.compute_dtype

    @cached_property
    def speed(self) -> float:
        """FLOP/s in the dtype of the forward. Raises ValueError where the device has none in that."""
        flops, dtype, name = self.rates.flops, self.dtype, self.rates.name
        if dtype not in flops:
            raise ValueError(
                f"{name} computes in {', '.join(flops)}, the configuration says {dtype}; change one of them"
            )
        return flops[dtype]

    @cached_property
    def blocks(self) -> list[str]:
        """The paths of all that can be recomputed, with stars for numbers in lists."""
        return list(dict.fromkeys(re.sub(r"\d+$", "*", unit.name) for unit in self.cost.units if unit.recomputable))

    @cached_property
    def policy(self) -> str:
        """Of recomputation, in the configuration; "auto" counts as "none", which it becomes where all fits."""
        section = self.settings.zero.recompute
        if not section.modules:
            return "none"
        on_host = self.settings.activation_checkpointing.cpu_checkpointing and section.policy == "full"
        return "host" if on_host else section.policy if section.policy in POLICIES else "none"


def _within(path: str, states: Mapping[str, int]) -> str:
    """The path of the innermost module with a state that this one lies in; the step where there is none."""
    while path not in states:
        if not path:
            return STEP
        path = path.rpartition(".")[0]
    return path


def choices_of(setup: Setup) -> list[StageChoice]:
    """Stages and placements on all ranks, state cut inside of hosts (HSDP), hpZ; and the configuration's own."""
    found, inside, ranks = list(CHOICES), setup.per_host, setup.ranks
    if 1 < inside < ranks and ranks % inside == 0:
        found += [StageChoice(stage, shard_size=inside) for stage in (1, 2, 3)] + [StageChoice(3, secondary=inside)]
    return list(dict.fromkeys([*found, own_choice(setup.settings)]))


def candidates(
    setup: Setup, choices: Iterable[StageChoice] | None = None, policies: Sequence[str] = POLICIES
) -> list[PlanRow]:
    """Rows of all choices and policies, each with several micro-batches: those that fit first, by seconds per sample.

    Of those within a hundredth of the fastest, than which no prediction is better, the plainest come first: with state
    on the device, of the lowest stage, without recomputation; then by what they move for a sample.
    Where `train_batch_size` is given it stays, and micro-batches are those that it can be made of; otherwise the number
    of micro-batches for a step stays. What does not fit at any size is there with the smallest one.
    """
    found = []
    for choice in choices_of(setup) if choices is None else choices:
        search = Search(setup, choice)
        for policy in policies:
            found += [search.row(policy, size) for size in search.sizes(policy)]
    fastest = min((pace_of(row) for row in found if not row.lacks), default=0.0)

    def key(row: PlanRow) -> tuple[float, ...]:
        if row.lacks:
            return 2, row.peak
        pace, moved = pace_of(row), sum(row.links) / (row.micro_batch * row.accumulation)
        if pace > _ALIKE * fastest:
            return 1, pace, moved
        away = (row.choice.optimizer, row.choice.params) != (DEVICE_MEMORY, DEVICE_MEMORY)
        return 0, away, row.choice.stage, POLICIES.index(row.policy), moved, pace

    return sorted(found, key=key)


def pace_of(row: PlanRow) -> float:
    """Seconds for a sample of one rank."""
    return row.step.step / (row.micro_batch * row.accumulation)


class Search:
    """The rows of one choice."""

    def __init__(self, setup: Setup, choice: StageChoice) -> None:
        self.setup, self.choice = setup, choice
        # By whether several micro-batches make a step: how many there are changes nothing of these.
        self._states: dict[bool, tuple[PlanRow, Moves]] = {}
        per_rank = setup.settings.raw.get("train_batch_size")
        rest = per_rank % setup.settings.world_size if isinstance(per_rank, int) else 1
        self._samples = None if rest else per_rank // setup.settings.world_size

    @cached_property
    def room(self) -> float:
        """Bytes of the device that a run may take."""
        settings, scheme = self.setup.settings, self._state(1)[1].scheme
        others = [settings.sequence_parallel_size, *(settings.grid.size(axis) for axis in ("tp", "pp"))]
        world = settings.world_size * math.prod(others)
        made = communicators(world, scheme.parts, scheme.replicas, scheme.secondary, others)
        return USABLE * self.setup.rates.device_memory - COMMUNICATOR * made * self.setup.mirrored

    def sizes(self, policy: str) -> list[int]:
        """Micro-batches to try: powers of two, the configuration's and the largest; the smallest where none fits."""
        most, own = self.largest(policy), self.setup.settings.train_micro_batch_size_per_gpu
        fitting = {1 << bit for bit in range(most.bit_length())} | {own, most}
        fitting = sorted(size for size in fitting if 0 < size <= most and not (self._samples or 0) % size)
        return fitting[-_SIZES:] or [1]

    def largest(self, policy: str) -> int:
        """The largest micro-batch that fits; 0 where none does."""
        if self._samples is None:
            return max(0, int(self.capacity(policy, self._accumulation(1))))
        whole = (size for size in range(self._samples, 0, -1) if self._samples % size == 0)
        return next((size for size in whole if size <= self.capacity(policy, self._accumulation(size))), 0)

    def row(self, policy: str, micro_batch: int) -> PlanRow:
        """What so many samples in one forward of one rank take and send, and whether they fit."""
        setup, cost, accumulation = self.setup, self.setup.cost, self._accumulation(micro_batch)
        state, moves = self._state(accumulation)
        part = micro_batch / setup.settings.sequence_parallel_size  # samples of it for one rank
        on_host = cost.on_host(policy, part)
        inputs = Links(host_link=2 * accumulation * on_host * setup.mirrored)
        alive = max(nbytes for at, nbytes, _ in cost.moments(policy) if at != LOSS)
        kinds = {"activations": part * alive, "logits": part * cost.logits}
        row = replace(
            state,
            device=state.device._replace(**{kind: int(nbytes) for kind, nbytes in kinds.items()}),
            policy=policy,
            micro_batch=micro_batch,
            accumulation=accumulation,
            inputs_on_host=on_host,
            peak=max(state + sample * part for state, sample in self._moments(policy, accumulation)),
            links=sum_of(inputs, moves.links(accumulation)),
            step=self._step(policy, part, accumulation),
            sets=_sets(setup, self.choice, policy, micro_batch, accumulation),
        )
        return replace(row, lacks=tuple(_lacks(setup, row, self.room)))

    def _accumulation(self, micro_batch: int) -> int:
        """How many micro-batches make a step."""
        given = self.setup.settings.gradient_accumulation_steps
        return given if self._samples is None else self._samples // micro_batch

    def _state(self, accumulation: int) -> tuple[PlanRow, Moves]:
        setup, several = self.setup, accumulation > 1
        if several not in self._states:
            scheme, row = self._scheme(1 + several)
            moves = Moves(setup.units, scheme, setup.rates, setup.per_host)
            self._states[several] = row, moves
        return self._states[several]

    def _scheme(self, accumulation: int) -> tuple[Scheme, PlanRow]:
        """What the choice means, and takes; where state is updated that rests off the device, as an engine decides."""
        setup, update = self.setup, self.setup.settings.zero_optimization.offload_optimizer.zero.update

        def made(streamed: bool) -> tuple[Scheme, PlanRow]:
            common = setup.units, setup.settings, self.choice, setup.formats
            scheme = scheme_of(*common, accumulation, setup.mirrored, setup.per_host, streamed)
            return scheme, state_row(setup.units, setup.settings, scheme, self.choice)

        if update != "auto" or not setup.mirrored:
            return made(update == "gpu")
        scheme, row = made(False)
        rates = UpdateRates(setup.rates.host_link, setup.rates.host_bandwidth, setup.rates.device_bandwidth)
        costs, held = update_costs(setup.units, scheme, rates), row.device
        room = (1 - RESERVE) * setup.rates.device_memory - held.parameters - held.gathered - held.reduction
        return made(True) if costs.streams(room) and is_fused(setup.settings.optimizer) else (scheme, row)

    def _moments(self, policy: str, accumulation: int) -> list[tuple[float, float]]:
        """When the most may be alive on the device: bytes of state, and of activations for each sample."""
        row, moments = self._state(accumulation)[0], self.setup.cost.moments(policy)
        left = {at: kept for at, _, kept in moments}
        found = [(row.moments[_within(at, row.moments)], alive) for at, alive, _ in moments]
        found += [(state, left.get(at, 0.0)) for at, state in row.ends.items()]
        return found + [(state, 0.0) for state in row.moments.values()]

    def capacity(self, policy: str, accumulation: int) -> float:
        """Samples of a micro-batch for which there is room, with their part of one more; negative where there is none
        for the state."""
        setup, host = self.setup, self._state(accumulation)[0].host.memory
        moments, away = self._moments(policy, accumulation), setup.cost.on_host(policy)
        if setup.mirrored:
            left = [(self.room - state, sample) for state, sample in moments]
            left.append((setup.rates.host_memory - host, away))
        else:
            left = [(self.room - state - host, sample + away) for state, sample in moments]
        if any(room < 0 for room, _ in left):
            return -1.0
        return setup.settings.sequence_parallel_size * min(room / sample for room, sample in left if sample)

    def _step(self, policy: str, samples: float, accumulation: int) -> Prediction:
        setup = self.setup
        state, moves = self._state(accumulation)
        costs = {unit.name: unit for unit in setup.cost.units}
        times = [self._computed(part, costs.pop(at, None), policy, samples) for at, part in moves.by_unit]
        times += [self._computed(UnitTimes(), unit, policy, samples) for unit in costs.values()]
        section, scheme = setup.settings.zero_optimization, moves.scheme
        numel = sum(unit.layout.numel for unit in moves.units) // max(1, len(moves.units))
        ahead = max(1, scheme.limits.ahead // max(1, numel)) if scheme.limits.ahead else 0
        pace = Pace(ahead, section.offload_optimizer.buffer_count, accumulation, scheme.sharding.grads)
        same = (DRIVE,) if setup.mirrored else (DRIVE, {DEVICE, LINK, HOST})
        norm = over(state.device.gradients, setup.rates.device_bandwidth)
        norm += setup.rates.latency if setup.ranks > 1 else 0.0  # ranks tell each other their parts of it
        return predict(times, norm, pace, same, _STEPS[any(unit.update or unit.bring for unit in times)])

    def _computed(self, times: UnitTimes, unit: UnitCost | None, policy: str, samples: float) -> UnitTimes:
        """With the seconds of the device. What is recomputed is written and read again, whatever its FLOPs; and inputs
        that go to the host and come back do so beside the next unit, of which they may take longer."""
        if unit is None:
            return times
        setup = self.setup
        away = over(samples * unit.on_host(policy), setup.rates.host_link) if setup.mirrored else 0.0
        forward, backward = (samples * flops / setup.speed for flops in (unit.forward_flops, unit.backward_flops))
        again = over(2 * samples * (unit.saved["none"] - unit.saved[policy]), setup.rates.device_bandwidth)
        again += samples * unit.recompute_flops[policy] / setup.speed
        known = setup.rates.recompute.get(setup.dtype, {})
        if unit.recomputable and known:
            again = known["full" if policy == "host" else policy] * (forward + backward)
        return times._replace(forward=max(away, forward), backward=max(away, times.backward + backward + again))


def _lacks(setup: Setup, row: PlanRow, room: float) -> Iterator[str]:
    """What there is too little of."""
    host = row.host.memory + row.inputs_on_host
    peak = row.peak if setup.mirrored else row.peak + host
    if peak > room:
        name = "device" if setup.mirrored else "memory"
        most = max(zip(row.device, row.device._fields, strict=True))
        yield f"{name}: {peak / GB:,.1f} GB of {room / GB:,.1f}, of which {most[1]} {most[0] / GB:,.1f}"
    if setup.mirrored and host > setup.rates.host_memory:
        yield f"host: {host / GB:,.1f} GB of {setup.rates.host_memory / GB:,.1f}"
    if row.host.files and not setup.rates.drive_read:
        yield "drive: no rate of one is known"


_PLAIN = {
    "zero_optimization.zero_hpz_partition_size": 1,
    "zero_optimization.zero_quantized_weights": False,
    "zero_optimization.zero_quantized_gradients": False,
    "zero_optimization.offload_optimizer.device": DEVICE_MEMORY,
    "zero_optimization.offload_param.device": DEVICE_MEMORY,
    "zero_optimization.offload_optimizer.zero.update": "host",
    "zero_optimization.mics_shard_size": -1,
    "zero.shard_size": 0,
    "zero.recompute": {},
    "activation_checkpointing.cpu_checkpointing": False,
}  # what is so without being said


def _sets(setup: Setup, choice: StageChoice, policy: str, micro_batch: int, accumulation: int) -> dict[str, Any]:
    """The keys of the JSON of a row, as far as the configuration does not say them by silence."""
    settings, section = setup.settings, setup.settings.zero_optimization
    sets = _PLAIN | {
        "train_batch_size": micro_batch * accumulation * settings.world_size,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization.stage": choice.stage,
        "zero_optimization.zero_hpz_partition_size": choice.secondary,
        "zero_optimization.zero_quantized_weights": choice.stage == 3 and section.zero_quantized_weights,
        "zero_optimization.zero_quantized_gradients": choice.stage > 0 and section.zero_quantized_gradients,
        "zero.shard_size": choice.shard_size,
        "zero_optimization.offload_optimizer.zero.update": "host"
        if choice.optimizer == DEVICE_MEMORY
        else section.offload_optimizer.zero.update,
        "activation_checkpointing.cpu_checkpointing": policy == "host",
    }
    for name, place in (("offload_optimizer", choice.optimizer), ("offload_param", choice.params)):
        sets[f"zero_optimization.{name}.device"] = place
        if place == FILE:
            sets[f"zero_optimization.{name}.nvme_path"] = getattr(section, name).nvme_path or "/tmp"
    if policy != "none":
        modules = settings.zero.recompute.modules or setup.blocks
        sets["zero.recompute"] = {"modules": modules, "policy": "full" if policy == "host" else policy}
    return {
        path: value
        for path, value in sets.items()
        if value != _PLAIN.get(path, ...) or lookup(settings.raw, path) is not None
    }
