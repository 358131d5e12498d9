"""`zero plan`: bytes per rank of a model, the search for what is fastest, or the groups of ranks of a grid."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from zero.config import Config, ConfigError, load
from zero.config.batch import MICRO, STEPS, TRAIN
from zero.config.grid_sizes import Told
from zero.config.override import apply
from zero.config.read import read
from zero.config.unavailable import lookup
from zero.launch.launch_messages import check_writable
from zero.log import counted
from zero.memory.available import available_nbytes
from zero.plan.formats import ITEMSIZE
from zero.plan.grid import AXES, DATA, PARTS_OF_MODEL, Grid, by_axis
from zero.sizes.cost import ModelCost, shape_cost
from zero.sizes.estimate import DEFAULT, EP, GB, TP, estimate
from zero.sizes.lines import of_each, wrapped
from zero.sizes.rates import DEVICES, Rates
from zero.sizes.shape import Shape, shape_of
from zero.tools.plan.search import Setup, candidates
from zero.tools.plan.table import name_of, nothing_fits, over_worlds, summary, table

if TYPE_CHECKING:
    from torch import nn

_ENABLED = "expert_parallel.enabled"
_DEVICE = "h100"  # where none is named
_SEQUENCE = 4096
_FORMS = {  # keys that say the size of an axis, of which the first is set; what is not predicted, and what is
    "pp": (("pipeline.stages",), "pipelines", "bytes and the bubble", "--json and --sequence"),
    "tp": ((TP, "tensor_parallel.tp.tp_size"), "layers that are cut", "bytes and messages", "--json"),
    "ep": ((EP, "expert_parallel.ep_size"), "experts that are divided", "bytes and messages", "--json"),
}
WORLDS = tuple(1 << bit for bit in range(11))  # that are compared where none is named


def run(given: argparse.Namespace) -> int:
    """Print what was asked for; returns the exit status."""
    try:
        if given.params is None and given.model is None:
            _print_groups(given)
            return 0
        _check(given)
        for line in _lines(given):
            print(line if line.startswith("{") else wrapped(line))
    except BrokenPipeError:  # not of the plan
        raise
    except (ConfigError, ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"zero plan: error: {error}", file=sys.stderr)
        return 2
    return 0


def _ranks_per_host(given: argparse.Namespace) -> int:
    """Raises ValueError for hosts of which each would not have the same number of ranks."""
    if given.nodes is None:
        return given.ranks_per_host
    if len(given.world or []) != 1:
        raise ValueError("--nodes: wants one number of ranks, in --world; for others say --ranks-per-host")
    if given.world[0] % given.nodes:
        raise ValueError(f"--nodes: got {given.nodes}, wanted a divisor of the {given.world[0]} ranks of --world")
    return given.world[0] // given.nodes


def _print_groups(given: argparse.Namespace) -> None:
    if not given.groups:
        wanted = "add --params N, such as 70e9, or a model, for the memory that it takes, or --groups for the groups"
        raise ValueError(f"nothing to print: {wanted} of ranks along each axis")
    if len(given.world or []) != 1:
        raise ValueError("--world: --groups wants one number of ranks")
    grid = _grid(given)
    for line in grid.warnings(_ranks_per_host(given)):
        print(f"zero plan: warning: {line}", file=sys.stderr)
    print("\n".join(grid.text()))


def _grid(given: argparse.Namespace) -> Grid:
    """Of the flags, and of an engine with the JSON of --config. Raises ValueError where they contradict each other."""
    world = given.world[0]
    sizes = by_axis({axis: size for axis in (*AXES, "sp", "ep") if (size := getattr(given, axis)) is not None})
    if given.config is None:
        return Grid(world, sizes, ep=sizes.pop("ep", 1))
    told = Told({axis: size for axis, size in sizes.items() if axis not in DATA}, "the command line")
    grid = load(given.config, world, told, filled=False).grid
    for axis in DATA:
        if sizes.get(axis, size := grid.size(axis)) != size:
            raise ValueError(f"--{axis.replace('_', '-')}: got {sizes[axis]}, but {given.config} makes it {size}")
    return grid


def _check(given: argparse.Namespace) -> None:
    """Raise ValueError for flags that mean nothing or would have no effect, before anything takes time."""
    if given.groups or (given.model is not None and given.params is not None):
        raise ValueError("a model, --params and --groups: one of them at a time")
    for axis in _FORMS:
        _check_form(given, axis)
    if shared := by_axis({axis: size for axis in ("cp", "sp") if (size := getattr(given, axis))}).get("cp"):
        given.config = read(given.config or DEFAULT).values | {"sequence_parallel_size": shared}
    for axis in ("dp_shard", "dp_replicate"):
        if getattr(given, axis) not in (None, 1):
            raise ValueError(f"--{axis.replace('_', '-')}: it is not planned; leave it out, or say zero.shard_size")
    if given.device == "measured" and not given.world:
        raise ValueError("--world: --device measured wants the number of ranks that are to be measured")
    _ranks_per_host(given)
    if given.json not in (None, "-"):
        check_writable(given.json, "--json")
    for flag in ("json", "all"):
        if getattr(given, flag) not in (None, False) and len(given.world or []) != 1:
            raise ValueError(f"--{flag}: wants one number of ranks, in --world")


def _check_form(given: argparse.Namespace, axis: str) -> None:
    """Have the configuration and --pp or --tp say the same. Raises ValueError where they do not, or for times."""
    source, said = read(given.config or DEFAULT), getattr(given, axis)
    keys, slow, known, without = _FORMS[axis]
    key = next((key for key in keys if lookup(source.values, key) not in (None, 0)), keys[0])
    size = lookup(source.values, key)
    if axis == "ep" and not lookup(source.values, _ENABLED):
        size = None
    if said not in (None, size):
        if size not in (None, "auto", 0):
            raise ValueError(f"--{axis}: got {said}, but {key} is {size!r} in {source.name}; keep one of the two")
        if source.errors:  # which a dict would not show
            raise ConfigError(source.errors, source.name)
        size, given.config = said, apply(source.values, {key: said} | ({_ENABLED: True} if axis == "ep" else {}))
    setattr(given, axis, size)
    if isinstance(size, int) and size > 1 and not _is_estimate(given):
        raise ValueError(
            f"{f'--{axis}' if said else key}: got {size}, wanted 1, as the time of {slow} is not predicted; for "
            f"{known} of a model say --device cuda and one --world, without {without}"
        )


def _is_estimate(given: argparse.Namespace) -> bool:
    """Whether bytes are asked for and nothing that takes a search."""
    whole = {given.tp, given.ep} <= {None, 0, 1}  # else a sequence says how large messages along these are, and no more
    timed = given.json or (given.sequence and whole)
    return given.device in ("cuda", "cpu") and len(given.world or WORLDS) == 1 and not timed


def _lines(given: argparse.Namespace) -> Iterator[str]:
    source = PlannedModel(given)
    worlds, name = given.world or WORLDS, str(source.model)
    if _is_estimate(given):
        model = given.params if source.inputs is None else source.model
        yield str(estimate(model, given.config, worlds[0], device=given.device, layers=given.layers, width=given.width))
        yield from _of_cut_layers(given, source)
        return
    setup = source.setup()
    if source.inputs is not None:
        numel = sum(spec.numel for unit in setup.units for spec in unit.params)
        name = f"{numel:,} parameters of {type(setup.model).__name__}"
    found = _searched(given, setup) if len(worlds) == 1 else over_worlds(setup, worlds)
    first = next(found)
    if first.startswith("nothing fits"):
        yield first
        first = next(found)
    yield f"{name}, in {setup.settings.compute_dtype}; samples of {setup.cost.sequence:,} tokens"
    speed = f"{setup.speed / 1e12:,.1f} TFLOP/s" if setup.speed >= 1e12 else f"{setup.speed / 1e9:,.1f} GFLOP/s"
    yield f"{setup.rates.name}: {setup.rates.device_memory / GB:,.0f} GB, {speed} reached"
    yield from (*setup.cost.notes, first)
    yield from found


def _of_cut_layers(given: argparse.Namespace, source: PlannedModel) -> Iterator[str]:
    """What ranks that layers or experts are divided among send in a micro-batch; nothing where they are not."""
    settings = load(given.config or DEFAULT, (given.world or WORLDS)[0], filled=False)
    if {settings.grid.size("tp"), settings.grid.size("ep")} == {1} or source.inputs is None:
        return
    from zero.sizes.cut_layers import CutCopy
    from zero.sizes.layer_messages import message_text

    for line in settings.grid.crossing([_ranks_per_host(given)] * settings.grid.world):
        print(f"zero plan: warning: {line}", file=sys.stderr)
    yield ""
    yield from message_text(CutCopy(cast("nn.Module", source.model), settings), source.inputs, given.device)


class PlannedModel:
    """The model that is planned, and what it costs: by formula, or traced on the meta device.

    inputs: arguments of its forward; None for a shape.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self._given, self._sequence = given, given.sequence or _SEQUENCE
        self.model: nn.Module | Shape
        if given.model is None:
            self.model, self.inputs = shape_of(given.params, given.layers, given.width), None
            return
        if ":" not in given.model and not os.path.isdir(given.model):
            wanted = "module:function, such as train:make_model, or a folder with a config.json"
            raise ValueError(f"model: got {given.model!r}; wanted {wanted}")
        from zero.tools.plan.source import load_model

        self.model, self.inputs = load_model(given.model, self._sequence)

    def setup(self) -> Setup:
        """What the search is made for."""
        given, worlds = self._given, self._given.world or WORLDS
        source = DEFAULT if given.config is None else given.config
        # Of batch sizes that cannot hold on several numbers of ranks, one is left.
        if len(worlds) > 1 and TRAIN in (values := read(source).values):
            source = {key: value for key, value in values.items() if key not in (MICRO, STEPS)}
        settings = load(source, worlds[0], filled=False, refused=PARTS_OF_MODEL)
        cost, per_host = self._cost(settings), _ranks_per_host(given)
        if settings.sequence_parallel_size > 1:  # beside the rest are q, k, v and the result, or another rank's k and v
            held = {"ulysses": 4, "ring": 2}[settings.zero.context.mode]
            units = (replace(it, working=it.working + held * it.recomputable * it.saved["full"]) for it in cost.units)
            notes = (*cost.notes, "The time of attention's messages is not counted.")
            cost = replace(cost, units=tuple(units), notes=notes)
        if (device := given.device) != "measured":
            if (name := _DEVICE if device == "cuda" else device) not in DEVICES:
                known = f"measured, {', '.join(DEVICES)}; or cuda or cpu, for bytes only"
                raise ValueError(f"--device: got {device!r}, wanted one of {known}")
            return Setup(self.model, cost, settings, DEVICES[name], per_host)
        rates, note = self._measured(settings, cost)
        return Setup(self.model, replace(cost, notes=(*cost.notes, note)), settings, rates, per_host, _has_gpu())

    def _cost(self, settings: Config) -> ModelCost:
        if self.inputs is None:
            return shape_cost(self.model, self._sequence, ITEMSIZE[settings.compute_dtype])
        from zero.sizes.model_trace import trace

        kernels = "cpu" if self._given.device in ("cpu", "measured") and not _has_gpu() else "cuda"
        return trace(self.model, self.inputs, settings, kernels)

    def _measured(self, settings: Config, cost: ModelCost) -> tuple[Rates, str]:
        """Of this machine, and a note on whose FLOP/s they are: the model's own, where it fits on it and runs."""
        from zero.tools.plan.rank_rates import measured

        ranks, dtype = settings.summed, settings.autocast_dtype or settings.compute_dtype
        why = "there is no model to run"
        if self.inputs is not None:
            from zero.sizes.model_trace import samples_in

            # Parameters and gradients in fp32, and activations. A GPU that has too little says so; a host would end
            # any process.
            numel = sum(param.numel() for param in self.model.parameters())
            wanted, there = 8 * numel + samples_in(self.inputs) * cost.peak(), math.inf
            if not _has_gpu():
                there = available_nbytes(ranks)
            why = f"the model would take {wanted / GB:,.1f} GB of each rank here, of {there / GB:,.1f}"
            if wanted < there:
                try:
                    rates = measured(ranks, dtype, model=self._given.model, sequence=self._sequence)
                    return rates, "FLOP/s are those of the model itself, with the inputs that it is given here."
                except RuntimeError as error:
                    why = f"running the model failed: {str(error).splitlines()[-1]}"
        return measured(ranks, dtype), f"FLOP/s are those of transformer blocks: {why}."


def _searched(given: argparse.Namespace, setup: Setup) -> Iterator[str]:
    """The table and what is best in it; or the configuration."""
    rows = candidates(setup)
    best = rows[0]
    if best.lacks:
        yield nothing_fits(rows)
    yield f"GB (1e9 bytes) at most on {of_each(setup.ranks)}, {setup.per_host} to a host"
    yield "The fastest come first; of those within 1 % of the fastest, the plainest." + (
        " In place of tokens/s stands what a row has too little of." if rows[-1].lacks else ""
    )
    yield from table(setup, rows, given.all)
    yield counted(len(rows), "row") + (
        "" if given.all else "; --all prints them, with the GB of each kind and on each link"
    )
    if not best.lacks:
        yield from summary(setup, rows)
    if given.json is not None:
        if best.lacks:
            raise ValueError(f"--json: nothing fits, so there is no configuration to write ({'; '.join(best.lacks)})")
        values = apply(setup.settings.raw, best.sets)
        load(values, setup.ranks, filled=False, refused=PARTS_OF_MODEL)
        text = json.dumps(values, indent=2)
        if given.json != "-":
            Path(given.json).write_text(f"{text}\n", encoding="utf-8")
            text = f"wrote {given.json}: {name_of(best)}"
        yield text


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
