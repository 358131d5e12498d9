"""Many seeds of the trust check, on right models and with planted errors, under another choice of CPU kernels.

    ATEN_CPU_CAPABILITY=avx2 python tests/sweep_trust.py --seeds 50
    ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=COMPATIBLE python tests/sweep_trust.py --seeds 10

Each seed checks every model, and plants every kind of error in one of them, in turn. It prints every false alarm and
every planted error that was not found; the exit status is 1 if there were such.
"""

from __future__ import annotations

import argparse
import sys

import ranks
from planted import MODELS, alarms, planted
from ranks import Pool


def main() -> int:
    """Run what the command line says; see above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    given = parser.parse_args()
    ranks.SECONDS = 1800  # on a busy machine
    pool, wrong = Pool(2), 0
    for seed in range(given.first, given.first + given.seeds):
        model = list(MODELS)[seed % len(MODELS)]
        said = pool.run(1 if seed % 5 > 2 else 2, alarms, seed)[0]
        found = pool.run(2, planted, model, seed)[0]
        lines = [f"FALSE ALARM: {alarm}" for alarm in said.values() if alarm]
        lines += [f"NOT FOUND: {model}, seed {seed}: {name}" for name, there in found.items() if not there]
        print(f"seed {seed}: {len(said)} right models, {len(found)} errors in {model}", *lines, sep="\n", flush=True)
        wrong += len(lines)
    pool.close()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
