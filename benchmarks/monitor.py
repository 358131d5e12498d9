"""What monitors, the run folder and the norms of units cost in a step: engines of one process by turns.

    python benchmarks/monitor.py --ranks 2 --stage 2

Every variant is an engine of its own with the same model and data. A turn is a few steps of one, timed together, as the
thread that writes works while the next step computes; each ratio is to the turn of `off` in the same round. `off again`
is the same configuration as `off`: what it differs by is the noise. The cost of what is there when all is off, in
microseconds, is that of calling it alone. Norms of units cost passes over the shard, so their share falls with the
tokens of a step, which are 2,048 per rank. Wanted: a ratio of at most 1.01 for `all`; run it on an idle machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from measure import machine_line, paired, rotated, run_ranks, slowest, stat, table
from torch import nn

import zero


class Counts(NamedTuple):
    """What is trained, and for how long."""

    stage: int
    rounds: int
    block: int
    layers: int
    width: int
    length: int
    batch: int


def variants(folder: str) -> dict[str, dict[str, Any]]:
    """The keys of each."""
    job = {"enabled": True, "output_path": folder}
    sinks = {"csv_monitor": job}
    if importlib.util.find_spec("tensorboard") is not None:
        sinks["tensorboard"] = job
    return {
        "off": {},
        "off again": {},
        "monitors": sinks,
        "report": {"zero": {"report": f"{folder}/report"}},
        "unit norms": {"zero": {"unit_norms": True}},
        "all, norms every 10 steps": {**sinks, "zero": {"report": f"{folder}/ten", "unit_norms": 10}},
        "all": {**sinks, "zero": {"report": f"{folder}/all", "unit_norms": True}},
    }


def make_model(counts: Counts) -> nn.Module:
    """An encoder whose layers are the units."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(counts.width, 8, 4 * counts.width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, counts.layers, enable_nested_tensor=False)


def timed(rank: int, counts: Counts) -> tuple[dict[str, list[float]], float]:
    """Seconds of each turn's step by variant, the maximum over ranks; and of what a step calls when all is off."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    common = {
        "train_micro_batch_size_per_gpu": counts.batch,
        "steps_per_print": float("inf"),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": counts.stage},
    }
    keys = variants(folder[0])
    engines = {name: zero.initialize(model=make_model(counts), config=common | more)[0] for name, more in keys.items()}
    data = torch.randn(counts.batch, counts.length, counts.width)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(counts.rounds + 1):
        for name in rotated(list(engines), turn):
            engine = engines[name]
            dist.barrier()
            began = time.perf_counter()
            for _ in range(counts.block):
                engine.backward(engine(data).square().mean())
                engine.step()
            times[name].append((time.perf_counter() - began) / counts.block)
    calls, progress = 10_000, engines["off"]._progress
    began = time.perf_counter()
    for _ in range(calls):
        for phase in ("forward", "backward", "step"):
            with progress.phase(phase):
                pass
        progress.report_step({}, 0)
    off = (time.perf_counter() - began) / calls
    return {name: slowest(seconds[1:]) for name, seconds in times.items()}, off


def main() -> None:
    """Print the medians and the ratios, round by round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    for name, value in Counts(2, rounds=9, block=2, layers=4, width=256, length=256, batch=8)._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=value, help="default: %(default)s")
    options = vars(parser.parse_args())
    ranks, counts = options.pop("ranks"), Counts(**options)
    times, off = run_ranks(timed, ranks, counts)
    rows = [
        (name, stat([1e3 * each for each in seconds]).text(1), paired(seconds, times["off"]).text(4))
        for name, seconds in times.items()
    ]
    print(machine_line(), "", table((f"stage {counts.stage}", "ms/step", "beside off"), rows), "", sep="\n")
    share = off / stat(times["off"]).median
    print(f"all off: {1e6 * off:.1f} us of calls in a step, {share:.4%} of it")


if __name__ == "__main__":
    main()
