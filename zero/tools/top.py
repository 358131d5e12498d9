"""`zero top DIR`: what each rank of a run does now, as a table that stays up to date or is printed once."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from datetime import timedelta

from zero.tools.report.written_run import Event, NoRunFolder, WrittenRank, read

_NEWEST = 2**16  # bytes of each file that are read
HEAD = ("rank", "step", "loss", "rate", "ms/step", "phase", "waits", "memory", "last line")
_COUNTS = ("samples", "tokens")
_STEPS = 20  # newest steps, over which rate and time are taken


def rows(folder: str) -> list[list[str]]:
    """A row of texts for each rank, under the names of the head; of several, first one of all of them together.

    Rank 0 writes loss, samples and tokens of all ranks: those are the first row's, and its own rate is what the others
    leave of it; its own loss nobody writes. Raises NoRunFolder and OSError.
    """
    first, *others = read(folder, newest=_NEWEST).ranks
    if first.number or not others:
        return [_row(rank, rank.steps()) for rank in (first, *others)]
    steps = first.steps()
    job = dict(zip(HEAD, _row(first, steps), strict=True)) | {"rank": "all", "phase": "", "waits": "", "memory": ""}
    known = [{step["step"]: step for step in rank.steps()} for rank in others]
    own = [_own(step, [theirs.get(step["step"]) for theirs in known]) for step in steps]
    return [list(job.values()), _row(first, own), *(_row(rank, rank.steps()) for rank in others)]


def _own(step: Event, others: Sequence[Event | None]) -> Event:
    """What is rank 0's of its step; without samples and tokens where another, None, has not written it yet."""
    whole = None not in others
    counts = {what: step[what] - sum(each[what] for each in others) if whole else None for what in _COUNTS}
    return {**step, **counts, "loss": None}


def run(folder: str, once: bool) -> int:
    """Print the table once, or keep it until Ctrl-C; returns the exit status."""
    try:
        if once:
            print(_plain(rows(folder)))
            return 0
        return _live(folder)
    except KeyboardInterrupt:
        return 0
    except ModuleNotFoundError as error:
        text = f"{error}; pip install 'zero[report]', or --once prints the table as plain text"
    except (NoRunFolder, OSError) as error:
        text = str(error)
    print(f"zero top: error: {text}", file=sys.stderr)
    return 2


def _row(rank: WrittenRank, steps: Sequence[Event]) -> list[str]:
    steps = steps[-_STEPS:]
    last = steps[-1] if steps else {}
    now = rank.last("phase", "end", "start")
    seconds = sum(step["seconds"] for step in steps)
    memory = rank.last("step", having="bytes").get("bytes")
    what = "tokens" if last.get("tokens") else "samples"
    done = [step[what] for step in steps if step[what] is not None]
    newest = max((event["time"] for event in rank.events if "time" in event), default=None)
    texts = {
        "rank": str(rank.number),
        "step": f"{last['step']:,}" if last else "",
        "loss": f"{last['loss']:.4g}" if last.get("loss") is not None else "",
        "rate": f"{sum(done) / seconds:,.0f} {what}/s" if seconds and len(done) == len(steps) else "",
        "ms/step": f"{1e3 * seconds / len(steps):,.0f}" if steps else "",
        "phase": ", waits for ".join(filter(None, (now.get("status") or now.get("phase", "start"), now.get("waits")))),
        "waits": f"{last['waits'] / last['seconds']:.0%}" if last.get("waits") is not None and last["seconds"] else "",
        "memory": f"{max(memory.values()) / 2**20:,.0f} MiB" if memory else "",  # one of the kinds is the whole
        "last line": "" if newest is None else f"{timedelta(seconds=max(0, round(time.time() - newest)))} ago",
    }
    return [texts[name] for name in HEAD]


def _plain(table: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(HEAD, *table, strict=True)]
    lines = [[text.rjust(width) for text, width in zip(row, widths, strict=True)] for row in (HEAD, *table)]
    return "\n".join("  ".join(line) for line in lines)


def _live(folder: str) -> int:
    from rich.live import Live
    from rich.table import Table

    def drawn() -> Table:
        table = Table(*HEAD, title=folder, caption="Ctrl-C ends this table, not the run")
        for row in rows(folder):
            table.add_row(*row)
        return table

    with Live(drawn(), auto_refresh=False) as live:
        while True:
            time.sleep(1)
            live.update(drawn(), refresh=True)
