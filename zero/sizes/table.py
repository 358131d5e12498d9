"""What `zero plan` prints: the rows as a table, the best of them, and whether more ranks pay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from zero.sizes.choice import CHOICES, Choice
from zero.sizes.cost import POLICIES
from zero.sizes.estimate import GB, Row
from zero.sizes.search import Search, Setup, candidates, pace_of

MOST_RANKS = 1 << 16  # beyond which no smaller share is looked for
_PAYS = 1.5  # times the speed for twice the ranks
_WIDTH = 11


def name_of(row: Row) -> str:
    """A row in words."""
    again = "" if row.policy == "none" else f", recompute {row.policy}"
    steps = f" x {row.accumulation}" if row.accumulation > 1 else ""
    return f"stage {row.choice}{again}, micro-batch {row.micro_batch}{steps}"


def table(setup: Setup, rows: Sequence[Row], whole: bool = False) -> list[str]:
    """The rows, in their order; the best of each choice and policy only, unless the `whole` is wanted."""
    shown = rows if whole else list({(row.choice, row.policy): row for row in reversed(rows)}.values())[::-1]
    cells = [_cells(setup, row) for row in shown]
    there = [name for name in cells[0] if any(line[name] for line in cells)]
    labels = [name_of(row) for row in shown]
    width = max(map(len, labels)) + 1
    lines = [" " * width + "".join(f"{name:>{_WIDTH + 1}}" for name in there)]
    for row, label, line in zip(shown, labels, cells, strict=True):
        text = "".join(f" {line[name]:{_WIDTH},.{0 if name == 'tokens/s' else 2}f}" for name in there)
        lines.append(f"{label:<{width}}{text}  {'; '.join(row.lacks)}".rstrip())
    return lines


def _cells(setup: Setup, row: Row) -> dict[str, float]:
    """Seconds, tokens, and GB: the most at once, by kind, on the host and the drive, and on each link in a step."""
    nbytes = {"peak": row.peak, **row.device._asdict(), "host": row.host.memory + row.inputs_on_host}
    nbytes |= {"drive": row.host.files}
    nbytes |= dict(zip(("in host", "to hosts", "host link", "drive link"), row.links, strict=True))
    gigabytes = {name: each / GB for name, each in nbytes.items()}
    return {"s/step": row.step.step, "tokens/s": tokens(setup, row), **gigabytes}


def tokens(setup: Setup, row: Row) -> float:
    """Per second and rank."""
    return setup.cost.sequence / pace_of(row)


class Waits(NamedTuple):
    """Of a step: the share that it is longer than without messages between ranks, and the time of these beside it."""

    longer: float
    busy: float


def waits(setup: Setup, row: Row) -> Waits:
    """What messages between ranks cost a row."""
    silent = replace(setup.rates, intra_host=0.0, inter_host=0.0, latency=0.0)
    alone = Search(replace(setup, rates=silent), row.choice).row(row.policy, row.micro_batch)
    return Waits(max(0.0, 1 - alone.step.step / row.step.step), row.step.busy["link"] / row.step.step)


def summary(setup: Setup, rows: Sequence[Row]) -> Iterator[str]:
    """The fastest that fits, the largest micro-batch, the longest sequence, and whether more ranks pay."""
    fitting = [row for row in rows if not row.lacks]
    if not fitting:
        least = min(rows, key=lambda row: row.peak)
        yield f"nothing fits; the least has {name_of(least)}: {'; '.join(least.lacks)}"
        return
    best = fitting[0]
    each = tokens(setup, best)
    yield (
        f"fastest that fits: {name_of(best)}; {best.step.step:,.3f} s a step, {each:,.0f} tokens/s on each rank, "
        f"{each * setup.ranks:,.0f} in all"
    )
    most = max(fitting, key=lambda row: row.micro_batch)
    yield f"largest micro-batch: {most.micro_batch:,} samples of {setup.cost.sequence:,} tokens, with {name_of(most)}"
    length, choice, policy = longest(setup, {row.choice for row in fitting})
    yield f"longest sequence: {length:,} tokens at micro-batch 1, with stage {choice}, recompute {policy}"
    yield pays(setup, best)


def longest(setup: Setup, choices: Sequence[Choice], policies: Sequence[str] = POLICIES) -> tuple[int, Choice, str]:
    """Tokens of the longest sample that fits, and with what. Activations grow with it: no scores are kept."""
    found = (
        (int(setup.cost.sequence * Search(setup, choice).capacity(policy, 2)), choice, policy)
        for choice in choices
        for policy in policies
    )
    return max(found, key=lambda each: each[0])


def pays(setup: Setup, row: Row) -> str:
    """Whether twice the ranks pay, in words."""
    more = setup.on(2 * setup.ranks)
    after = candidates(more, [row.choice])[0]
    gain = 2 * tokens(more, after) / tokens(setup, row)
    cost, later = waits(setup, row), waits(more, after)
    verdict = "pays" if gain >= _PAYS else "does not pay"
    return (
        f"{cost.longer:.0%} of a step is communication (messages go on for {cost.busy:.0%} of it); twice the ranks "
        f"{verdict}: {gain:.2f} x the speed, where {later.longer:.0%} of a step would be communication"
    )


def over_worlds(setup: Setup, worlds: Sequence[int]) -> Iterator[str]:
    """The best row of each number of ranks, with the share of communication, and up to where more ranks pay."""
    speeds: list[tuple[int, float, Waits]] = []
    yield f"{'ranks':>7} {'s/step':>10} {'tokens/s':>14} {'GB sent':>9} {'messages':>9} {'waits':>7}  best"
    for ranks in worlds:
        here = setup.on(ranks)
        best = candidates(here)[0]
        if best.lacks:
            yield f"{ranks:>7,} nothing fits; {'; '.join(best.lacks)}"
            continue
        cost, speed = waits(here, best), ranks * tokens(here, best)
        speeds.append((ranks, speed, cost))
        yield (
            f"{ranks:>7,} {best.step.step:>10,.3f} {speed:>14,.0f} {best.links.sent / GB:>9,.2f} {cost.busy:>9.0%} "
            f"{cost.longer:>7.0%}  {name_of(best)}"
        )
    if len(speeds) > 1:
        yield verdict(speeds)


def verdict(speeds: Sequence[tuple[int, float, Waits]]) -> str:
    """Of numbers of ranks with their tokens/s: up to which more pay. Twice the ranks shall give 1.5 times the speed."""
    (start, first, _), (end, last, cost) = speeds[0], speeds[-1]
    for (few, slow, _), (many, fast, share) in pairwise(speeds):
        if fast / slow < 1 + (_PAYS - 1) * (many / few - 1):
            return (
                f"more ranks pay up to {few:,}: on {many:,}, {share.longer:.0%} of a step would be communication, and "
                f"{many / few:g} x the ranks would give {fast / slow:.2f} x the speed"
            )
    return (
        f"more ranks pay up to {end:,} and perhaps beyond: {last / first:,.1f} x the speed of {start:,}, "
        f"{cost.longer:.0%} of a step is communication"
    )


def smallest(setup: Setup) -> Iterator[str]:
    """For each choice and policy, the smallest number of ranks on which the configured micro-batch fits."""
    size, known = setup.settings.train_micro_batch_size_per_gpu, {}

    def fits(choice: Choice, policy: str, ranks: int) -> bool:
        at = known.setdefault(ranks, setup.on(ranks))
        return not searches.setdefault((ranks, choice), Search(at, choice)).row(policy, size, timed=False).lacks

    searches: dict[tuple[int, Choice], Search] = {}
    yield f"ranks at least for micro-batch {size}, and in brackets a power of two, by what is recomputed"
    yield f"{'':<43}" + "".join(f"{policy:>16}" for policy in POLICIES)
    for choice in CHOICES:
        cells = []
        for policy in POLICIES:
            low, high = 0, 1
            while high <= MOST_RANKS and not fits(choice, policy, high):
                low, high = high, 2 * high
            power = high
            while high - low > 1 and high <= MOST_RANKS:
                middle = (low + high) // 2
                low, high = (low, middle) if fits(choice, policy, middle) else (middle, high)
            cells.append(f"{high:,} ({power:,})" if high <= MOST_RANKS else "never")
        yield f"{f'stage {choice}':<43}" + "".join(f"{cell:>16}" for cell in cells)
        if cells[0] == "never":
            yield f"    {'; '.join(searches[MOST_RANKS, choice].row('none', size).lacks)} on {MOST_RANKS:,} ranks"
