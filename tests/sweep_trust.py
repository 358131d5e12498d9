"""Many seeds of the trust check, on right models and with planted errors, under another choice of CPU kernels.

    python tests/sweep_trust.py --seeds 50 --capability avx2
    ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=COMPATIBLE python tests/sweep_trust.py --seeds 10

Prints a table with one line per model, every false alarm, and every planted error that was not found; the exit status
is 1 if there were such. Each seed checks every model, and plants every kind of error in one of them, in turn.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter

import ranks
import torch
from planted import MODELS, alarms, planted
from ranks import Pool


def main() -> int:
    """Run what the command line says; see above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--capability", choices=("default", "avx2", "avx512"), help="ATEN_CPU_CAPABILITY of the ranks")
    given = parser.parse_args()
    if given.capability:
        os.environ["ATEN_CPU_CAPABILITY"] = given.capability  # the ranks are started below
    os.environ["OMP_NUM_THREADS"] = "1"
    ranks.SECONDS = 1800  # on a busy machine
    pool, begin, wrong = Pool(2), time.monotonic(), []
    counts: dict[str, Counter[str]] = {model: Counter() for model in MODELS}
    said = pool.run(1, torch.backends.cpu.get_cpu_capability)[0]
    for seed in range(given.first, given.first + given.seeds):
        for model, alarm in pool.run(1 if seed % 5 > 2 else 2, alarms, seed)[0].items():
            counts[model].update(checks=1, alarms=alarm is not None)
            wrong += [f"FALSE ALARM: {alarm}"] if alarm else []
        model = list(MODELS)[seed % len(MODELS)]
        found = pool.run(2, planted, model, seed)[0]
        counts[model].update(planted=len(found), found=sum(found.values()))
        wrong += [f"NOT FOUND: {model}, seed {seed}: {name}" for name, there in found.items() if not there]
        print(f"seed {seed}: {time.monotonic() - begin:.0f} s", *wrong, sep="\n", file=sys.stderr, flush=True)
    pool.close()
    print(f"kernels of torch: {said}; seeds {given.first} to {given.first + given.seeds - 1}")
    print(f"{'model':18}{'checks':>8}{'false alarms':>14}{'planted':>9}{'found':>7}")
    total: Counter[str] = Counter()
    for model, count in (*counts.items(), ("together", total)):
        print(f"{model:18}{count['checks']:8}{count['alarms']:14}{count['planted']:9}{count['found']:7}")
        total.update(count)
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
