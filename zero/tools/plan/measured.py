"""The rates of this machine, measured by ranks that are started for it.

Started as `-m zero.tools.plan.measured DIR DTYPE WIDTH MODEL SEQUENCE`, each rank writes a JSON object with fields of
`Rates` to a file in DIR. MODEL, SEQUENCE: as `zero plan` is given them, "" for transformer blocks.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zero.core.world import local_device
from zero.engine.joining import init_distributed
from zero.log import counted
from zero.sizes.rank_rates import measure
from zero.sizes.rates import Rates
from zero.tools.plan.source import load_model
from zero.tools.started_ranks import SECONDS, run_on_ranks


def measured(ranks: int, dtype: str = "fp32", width: int = 512, model: str = "", sequence: int = 1) -> Rates:
    """The rates of this machine with `ranks` ranks on it, all of which compute and send at the same time.

    Takes some seconds. dtype: measured beside fp32; width: of the transformer block whose FLOP/s are taken (small ones
    reach less); model, sequence: as `load_model` takes them, whose own FLOP/s are taken then. Each figure is the median
    over ranks. `inter_host` is `intra_host`: there is one host. Raises RuntimeError that says why it could not be.
    """
    ended = run_on_ranks(ranks, "zero.tools.plan.measured", dtype, str(width), model, str(sequence))
    if ended.status is None:
        raise RuntimeError(f"measuring {counted(ranks, 'rank')} of this machine took over {SECONDS} s")
    if ended.status or len(ended.wrote) < ranks:
        text = f"the rates of this machine could not be measured on {counted(ranks, 'rank')}:"
        raise RuntimeError(f"{text}\n{ended.said}")
    return together([json.loads(text) for text in ended.wrote.values()])


def together(found: Sequence[Mapping[str, Any]]) -> Rates:
    """The median of each figure over ranks, of what `measure` gave on each."""
    return Rates(name="measured", **{name: _middle([each[name] for each in found]) for name in found[0]})


def _middle(values: Sequence[Any]) -> Any:
    """The median of numbers, or of each number in mappings."""
    if isinstance(values[0], Mapping):
        return {key: _middle([each[key] for each in values]) for key in values[0]}
    return statistics.median(values)


def run(answers: Path, dtype: str, width: int, model: str, sequence: int) -> None:
    """Join the ranks that were started together, measure, and write down what was found."""
    init_distributed()
    rates = measure(dtype, width, partial(load_model, model, sequence, local_device()) if model else None)
    (answers / str(dist.get_rank() if dist.is_initialized() else 0)).write_text(json.dumps(rates), encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
