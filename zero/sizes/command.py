"""`zero plan` of a model: the table of bytes per rank, and where a device is named, the search for what is fastest."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from zero.config import Config, ConfigError, load
from zero.config.override import apply
from zero.plan.formats import ITEMSIZE
from zero.sizes.asks import answer
from zero.sizes.choice import own_choice
from zero.sizes.cost import ModelCost, shape_cost
from zero.sizes.estimate import DEFAULT, Row, estimate
from zero.sizes.rates import DEVICES, Rates, measured
from zero.sizes.search import Search, Setup, candidates
from zero.sizes.shape import shape_of
from zero.sizes.table import name_of, over_worlds, smallest, summary, table

_DEVICE = "h100"  # where none is named
_SEQUENCE = 4096


def plan(given: argparse.Namespace) -> int:
    """Print what was asked for; returns the exit status."""
    axes = [name for name in ("tp", "pp", "cp", "dp_shard", "dp_replicate") if getattr(given, name) not in (None, 1)]
    try:
        if given.groups:
            raise ValueError("--params and --groups: one table at a time; give one of them")
        if axes:
            raise ValueError(
                f"--{axes[0].replace('_', '-')}: the memory is that of data-parallel ranks; leave it out, or say "
                "zero.shard_size in the configuration"
            )
        for line in _lines(given):
            print(line)
    except (ConfigError, OSError, RuntimeError, ValueError) as error:
        print(f"zero plan: error: {error}", file=sys.stderr)
        return 2
    return 0


def _lines(given: argparse.Namespace) -> Iterator[str]:
    worlds = given.world or []
    searched = given.device not in ("cuda", "cpu") or given.json or given.ask or given.sequence or len(worlds) != 1
    if not searched:
        config, (ranks,) = given.config, worlds
        found = estimate(given.params, config, ranks, device=given.device, layers=given.layers, width=given.width)
        yield str(found)
        return
    setup = _setup(given, (worlds or [1])[0])
    yield f"{setup.model}, in {setup.settings.compute_dtype}; samples of {setup.cost.sequence:,} tokens"
    yield f"{setup.rates.name}: {setup.rates.device_memory / 1e9:,.0f} GB, {setup.speed / 1e12:,.0f} TFLOP/s reached"
    yield from setup.cost.notes
    if not worlds:
        yield from smallest(setup)
    elif len(worlds) > 1:
        yield from over_worlds(setup, worlds)
    else:
        yield from _searched(given, setup)


def _searched(given: argparse.Namespace, setup: Setup) -> Iterator[str]:
    """The table and what is best in it; or the answers; or the configuration."""
    rows = candidates(setup)
    best = rows[0]
    if given.ask:
        if given.config is not None:
            search = Search(setup, own_choice(setup.settings))
            best = search.row(setup.policy, setup.settings.train_micro_batch_size_per_gpu)
        yield name_of(best)
        yield from answer(given.ask, setup, best)
        return
    yield f"GB (1e9 bytes) at most on each of {setup.ranks:,} ranks, {setup.per_host} to a host; GB sent in a step"
    yield from table(setup, rows, given.all)
    yield f"{len(rows)} rows"
    yield from summary(setup, rows)
    if given.json:
        yield from _written(given.json, setup, best)


def _written(path: str, setup: Setup, row: Row) -> Iterator[str]:
    if row.lacks:
        raise ValueError(f"--json: nothing fits, so there is no configuration to write ({'; '.join(row.lacks)})")
    values = apply(setup.settings.raw, row.overrides())
    load(values, setup.ranks, filled=False)
    text = json.dumps(values, indent=2)
    if path != "-":
        Path(path).write_text(f"{text}\n", encoding="utf-8")
    yield text if path == "-" else f"wrote {path}: {name_of(row)}"


def _setup(given: argparse.Namespace, ranks: int) -> Setup:
    settings = load(DEFAULT if given.config is None else given.config, ranks, filled=False)
    shape = shape_of(given.params, given.layers, given.width)

    def cost(settings: Config) -> ModelCost:
        return shape_cost(shape, given.sequence or _SEQUENCE, ITEMSIZE[settings.compute_dtype])

    rates, mirrored = _rates(given.device, ranks, settings.compute_dtype)
    per_host = -(-ranks // given.nodes) if given.nodes else given.ranks_per_host
    return Setup(shape, cost(settings), settings, rates, per_host, mirrored, cost)


def _rates(device: str, ranks: int, dtype: str) -> tuple[Rates, bool]:
    """Rates of a device, and whether it has memory of its own."""
    if device == "measured":
        import torch

        return measured(ranks, dtype), torch.cuda.is_available()
    name = _DEVICE if device == "cuda" else device
    if name not in DEVICES:
        raise ValueError(f"--device: got {device!r}, wanted one of measured, {', '.join(DEVICES)}; or cuda or cpu")
    return DEVICES[name], True
