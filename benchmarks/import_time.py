"""What `import zero` costs: whole Python processes, interleaved, beside `import torch`.

python benchmarks/import_time.py
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from measure import machine_line, rotated, stat, table

TORCH = "import torch"
PROGRAMS = ("pass", TORCH, "import zero", "import zero; zero.initialize")


def seconds_of(program: str) -> float:
    """Wall time of one process from its start to its end."""
    # Bytecode is kept, as it is for users: else each process would compile zero anew, but not torch.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="time `import zero` in fresh processes")
    parser.add_argument("--repeat", type=int, default=11, help="processes of each kind")
    args = parser.parse_args()
    for program in PROGRAMS:  # so that every file is in the page cache and has its bytecode
        seconds_of(program)
    seconds: dict[str, list[float]] = {program: [] for program in PROGRAMS}
    for turn in range(args.repeat):
        for program in rotated(PROGRAMS, turn):
            seconds[program].append(seconds_of(program))
    rows = []
    for program, times in seconds.items():
        apart = [own - other for own, other in zip(times, seconds[TORCH], strict=True)]
        rows.append([f"`python -c '{program}'`", stat(times).text(3), stat(apart).text(3)])
    print(machine_line())
    print(f"\nwhole processes, {args.repeat} of each, median [min-max]\n")
    print(table(["", "s", "s more than `import torch`"], rows))


if __name__ == "__main__":
    main()
