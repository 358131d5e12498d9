"""Does `zero tune` find a configuration as fast as the best of all, in under a quarter of the time?

    python benchmarks/tune.py

Tunes the example GPT, small, over stage, recomputation and micro-batch; then tries every row of the same space that
fits, as `zero tune` would with enough runs. What `zero tune` chose is compared with the best of those, both as timed in
that exhaustive run. Configurations that both have timed show the spread of repeats.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

from measure import machine_line

from zero.engine.tune.script import tune
from zero.launch.args.tune import TuneRequest

GPT = Path(__file__).parents[1] / "examples" / "gpt"
TEXT = Path(__file__).parents[1] / "zero"
EVERYTHING = 10_000
WITHIN = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=7, help="that are measured in each run")
    parser.add_argument("--runs", type=int, default=5, help="of zero tune, beside the script's own configuration")
    parser.add_argument("--space", default="stage,recomputation,micro_batch")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    args = parser.parse_args()
    shape = [f"--{name}={getattr(args, name)}" for name in ("width", "layers", "heads", "context")]
    request = TuneRequest(
        script=str(GPT / "train.py"),
        script_args=("--config", str(GPT / "zero2.json"), "--data", str(TEXT), *shape),
        num_gpus=args.ranks,
        steps=args.steps,
        space=tuple(args.space.split(",")),
        runs=args.runs,
        limit=float(EVERYTHING),
    )
    print(machine_line(), flush=True)
    tuned = tune(request)
    print(f"\nzero tune\n\n{tuned}\n", flush=True)
    every = tune(replace(request, runs=EVERYTHING))
    print(f"\nall of the space\n\n{every}\n")
    times = {run.name: run.median for run in every.runs}
    twice = [abs(run.median / times[run.name] - 1) for run in tuned.runs if run.seconds and run.name in times]
    spread, behind = statistics.median(twice), times[tuned.best.name] / every.best.median - 1
    print(f"chosen: {tuned.best.name}; the best of all: {every.best.name}")
    print(f"as timed in the exhaustive run, the chosen one takes {behind:.1%} more; repeats differ by {spread:.1%}")
    print(f"time: {tuned.seconds:.0f} s of {every.seconds:.0f} s, {tuned.seconds / every.seconds:.0%}")
    held = behind <= max(WITHIN, spread) and tuned.seconds < every.seconds / 4
    print(f"within {WITHIN:.0%} or the spread, in under a quarter of the time: {'yes' if held else 'no'}")


if __name__ == "__main__":
    main()
