"""Does `zero tune` find a configuration as fast as the best of all, in under a quarter of the time?

    python benchmarks/tune.py --kept tune.jsonl --seconds 200     # again and again, until benchmarks/tune.md is written

Tunes the example GPT, small, over stage, recomputation and micro-batch, `--tunes` times. Then it tries every row of the
same space that fits, once each, as `zero tune` would with enough runs. What `zero tune` chose and the fastest
`--finalists` of those run again `--turns` times by turns: one run decides nothing. Each part is a line of the file.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measure import Kept, machine_line, paired, rotated, stat, table

from zero.launch.args.scripts import TuneRequest
from zero.tools.tune.tuning import try_row, tune

ROOT = Path(__file__).parents[1]
GPT = ROOT / "examples" / "gpt"
FOREVER = 10_000.0
WITHIN, PART = 0.05, 1 / 4


def tried(request: TuneRequest, row: Mapping[str, Any]) -> dict[str, Any]:
    """One run of a row: its name, seconds of a step (None where it failed), and of the whole run."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = try_row(request, row, Path(folder, "0"), FOREVER)
    step = run.median if run.seconds else None
    return {"name": run.name, "step": step, "why": run.why, "seconds": time.monotonic() - begin}


def measure(request: TuneRequest, args: argparse.Namespace, kept: Kept) -> None:
    """All that is not yet in the file."""
    while len(kept.of("tune")) < args.tunes:
        kept.go_on()
        tuned = tune(request)
        print(tuned, flush=True)
        runs = [[run.name, run.median if run.seconds else None] for run in tuned.runs]
        rows = [row for row in tuned.rows if not row["lacks"]]
        kept.add("tune", name=tuned.best.name, seconds=tuned.seconds, runs=runs, rows=rows)
    rows = {row["name"]: row for run in kept.of("tune") for row in run["rows"]}
    done = {row["name"] for row in kept.of("row")}
    for name in [name for name in rows if name not in done]:
        kept.go_on()
        kept.add("row", **tried(request, rows[name]))
    names = finalists(kept, args.finalists)
    for turn in range(args.turns):
        done = {run["name"] for run in kept.of("turn") if run["turn"] == turn}
        for name in rotated(names, turn):
            if name not in done:
                kept.go_on()
                kept.add("turn", turn=turn, **tried(request, rows[name]))


def finalists(kept: Kept, count: int) -> list[str]:
    """What `zero tune` has chosen, then the fastest of all rows."""
    timed = sorted((row for row in kept.of("row") if row["step"]), key=lambda row: row["step"])
    return list(dict.fromkeys([run["name"] for run in kept.of("tune")] + [row["name"] for row in timed[:count]]))


def report(kept: Kept, args: argparse.Namespace) -> tuple[str, bool]:
    """The tables, and whether it is as promised."""
    turns: dict[str, list[float]] = {}
    for run in kept.of("turn"):
        turns.setdefault(run["name"], []).append(1e3 * run["step"])
    once = {row["name"]: row["step"] for row in kept.of("row")}
    best = min(turns, key=lambda name: stat(turns[name]).median)
    chosen = [run["name"] for run in kept.of("tune")]
    rows = [
        [
            name,
            f"{1e3 * once[name]:.1f}",
            stat(times).text(1),
            paired(times, turns[best]).text(3),
            str(chosen.count(name) or "-"),
        ]
        for name, times in sorted(turns.items(), key=lambda each: stat(each[1]).median)
    ]
    final = table(["fastest of all, and chosen", "ms, once", "ms, by turns", "to the best", "chosen"], rows)
    spread = statistics.median((stat(each).high - stat(each).low) / 2 / stat(each).median for each in turns.values())
    behind = max(paired(turns[name], turns[best]).median - 1 for name in chosen)
    every, tuned = sum(row["seconds"] for row in kept.of("row")), [run["seconds"] for run in kept.of("tune")]
    held = behind <= max(WITHIN, spread) and max(tuned) < PART * every
    failed = [row["name"] for row in kept.of("row") if not row["step"]]
    said = [
        f"`zero tune` tried {len(kept.of('tune')[0]['runs'])} configurations in "
        f"{', '.join(f'{each:.0f}' for each in tuned)} s; all {len(once)} took {every:.0f} s, each once"
        + (f" ({len(failed)} failed: {'; '.join(failed)})" if failed else "")
        + f": {max(tuned) / every:.0%} of that time at most.",
        f"What it chose takes at most {behind:.1%} more than the best by turns; repeats of one spread by "
        f"+-{spread:.1%}.",
        f"Within {WITHIN:.0%} or the spread of the best, in under a quarter of the time: **{'yes' if held else 'no'}**",
    ]
    whole = sorted(kept.of("row"), key=lambda row: row["step"] or FOREVER)
    planned = {row["name"]: row["seconds"] for row in kept.of("tune")[0]["rows"]}
    lines = [
        [row["name"], f"{1e3 * row['step']:.1f}" if row["step"] else row["why"], f"{1e3 * planned[row['name']]:.1f}"]
        for row in whole
    ]
    return "\n\n".join(
        [
            machine_line(),
            "\n".join(said),
            final,
            "All, each once:",
            table(["configuration", "ms/step", "ms planned"], lines),
        ]
    ), held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kept", type=Path, required=True, help="file of the parts that are done")
    parser.add_argument("--seconds", type=float, default=FOREVER, help="after which a call begins no further part")
    parser.add_argument("--tunes", type=int, default=2, help="how often zero tune runs (default: %(default)s)")
    parser.add_argument("--finalists", type=int, default=3, help="rows that run again (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=4, help="runs of each of those (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=7, help="that are measured in each run")
    parser.add_argument("--runs", type=int, default=5, help="of zero tune, beside the script's own configuration")
    parser.add_argument("--space", default="stage,recomputation,micro_batch")
    for name, size in {"width": 128, "layers": 4, "heads": 4, "context": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    args = parser.parse_args()
    shape = [f"--{name}={getattr(args, name)}" for name in ("width", "layers", "heads", "context")]
    request = TuneRequest(
        script=str(GPT / "train.py"),
        script_args=("--config", str(GPT / "zero2.json"), "--data", str(ROOT / "zero"), *shape),
        num_gpus=args.ranks,
        steps=args.steps,
        space=tuple(args.space.split(",")),
        runs=args.runs,
        limit=FOREVER,
    )
    kept = Kept(args.kept, args.seconds)
    measure(request, args, kept)
    text, held = report(kept, args)
    print(text)
    about = "# `zero tune` beside an exhaustive run\n\nWritten by `python benchmarks/tune.py`.\n"
    about += __doc__.split("\n\n")[2].strip()
    (Path(__file__).parent / "tune.md").write_text(f"{about}\n\n{text}\n", encoding="utf-8")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
