"""What `zero plan` prints: the rows as a table, the best of them, and whether more ranks pay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from zero.sizes.choice import StageChoice
from zero.sizes.cost import POLICIES
from zero.sizes.estimate import PlanRow
from zero.sizes.lines import gigabytes, table_lines
from zero.tools.plan.search import Search, Setup, candidates, pace_of


def name_of(row: PlanRow) -> str:
    """A row in words."""
    return f"stage {row.choice}{_again(row)}, micro-batch {_size(row)}"


def _again(row: PlanRow) -> str:
    return "" if row.policy == "none" else f", recompute {row.policy}"


def _size(row: PlanRow) -> str:
    return f"{row.micro_batch}" + (f" x {row.accumulation}" if row.accumulation > 1 else "")


def table(setup: Setup, rows: Sequence[PlanRow], whole: bool = False) -> Iterator[str]:
    """The rows, in their order; without `whole` the best of each choice and policy, as far as one table holds it.

    In place of the speed of what does not fit stands what there is too little of.
    """
    best: dict[tuple[StageChoice, str], PlanRow] = {}
    for row in rows:
        best.setdefault((row.choice, row.policy), row)
    shown = rows if whole else list(best.values())
    cells = [_cells(setup, row) for row in shown]
    columns = {name: [line[name] for line in cells] for name in cells[0]}
    there = {name: texts for name, texts in columns.items() if {*texts} != {gigabytes(0)}}
    yield from table_lines("stage", [f"{row.choice}{_again(row)}" for row in shown], there, whole)


def _cells(setup: Setup, row: PlanRow) -> dict[str, str]:
    """Seconds, tokens, and GB: the most at once, by kind, on the host and the drive, and on each link in a step."""
    nbytes = {"peak": row.peak, "host": row.host.memory + row.inputs_on_host, "drive": row.host.files}
    nbytes |= row.device._asdict()
    nbytes |= dict(zip(("in host", "to hosts", "host link", "drive link"), row.links, strict=True))
    speed = {"s/step": f"{row.step.step:,.2f}", "tokens/s": f"{tokens(setup, row):,.0f}"}
    if row.lacks:
        speed = {"s/step": "-", "tokens/s": row.lacks[0].partition(":")[0]}
    return {"micro-batch": _size(row), **speed} | {name: gigabytes(each) for name, each in nbytes.items()}


def tokens(setup: Setup, row: PlanRow) -> float:
    """Per second and rank."""
    return setup.cost.sequence / setup.settings.sequence_parallel_size / pace_of(row)


class MessageShare(NamedTuple):
    """Of a step: the share in which ranks wait for messages, so much longer is it; that in which messages travel."""

    longer: float
    busy: float


def waits(setup: Setup, row: PlanRow) -> MessageShare:
    """What messages between ranks cost a row."""
    silent = replace(setup.rates, intra_host=0.0, inter_host=0.0, latency=0.0)
    alone = Search(replace(setup, rates=silent), row.choice).row(row.policy, row.micro_batch)
    return MessageShare(max(0.0, 1 - alone.step.step / row.step.step), row.step.busy["link"] / row.step.step)


def summary(setup: Setup, rows: Sequence[PlanRow]) -> Iterator[str]:
    """The fastest that fits, the largest micro-batch, the longest sequence, and whether more ranks pay."""
    fitting = [row for row in rows if not row.lacks]
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


def nothing_fits(rows: Sequence[PlanRow]) -> str:
    """The verdict where none of these fits, with what the one that takes least has too little of."""
    least = min(rows, key=lambda row: row.peak)
    return f"nothing fits; the least has {name_of(least)}: {'; '.join(least.lacks)}"


def longest(
    setup: Setup, choices: Sequence[StageChoice], policies: Sequence[str] = POLICIES
) -> tuple[int, StageChoice, str]:
    """Tokens of the longest sample that fits, and with what. Activations grow with it: no scores are kept."""
    found = (
        (int(setup.cost.sequence * Search(setup, choice).capacity(policy, 2)), choice, policy)
        for choice in choices
        for policy in policies
    )
    return max(found, key=lambda each: each[0])


def pays(setup: Setup, row: PlanRow) -> str:
    """Whether twice the ranks pay, in words."""
    more = setup.on(2 * setup.ranks)
    after = candidates(more, [row.choice])[0]
    gain = 2 * tokens(more, after) / tokens(setup, row)
    cost, later = waits(setup, row), waits(more, after)
    verdict = "pays" if gain >= enough(2) else "does not pay"
    return (
        f"messages travel for {cost.busy:.0%} of a step, and ranks wait for them for {cost.longer:.0%} of it; twice "
        f"the ranks {verdict}: {gain:.2f} x the speed, with waits of {later.longer:.0%}"
    )


def enough(ranks: float) -> float:
    """From which speed beside one process `ranks` pay: half of what each further one could give."""
    return 1 + (ranks - 1) / 2


def over_worlds(setup: Setup, worlds: Sequence[int]) -> Iterator[str]:
    """The best row of each number of ranks, with the share of communication, and up to where more ranks pay."""
    setups = [setup.on(ranks) for ranks in worlds]
    rows = [candidates(each)[0] for each in setups]
    if all(row.lacks for row in rows):
        yield nothing_fits(rows)
    there = [(each, row) for each, row in zip(setups, rows, strict=True) if not row.lacks]
    speeds = [(each.ranks, each.ranks * tokens(each, row), waits(each, row)) for each, row in there]
    columns = {
        "s/step": [f"{row.step.step:,.3f}" for _, row in there],
        "tokens/s": [f"{speed:,.0f}" for _, speed, _ in speeds],
        "GB sent": [gigabytes(row.links.sent) for _, row in there],
        "messages": [f"{cost.busy:.0%}" for *_, cost in speeds],
        "waits": [f"{cost.longer:.0%}" for *_, cost in speeds],
    }
    if there:
        yield from table_lines("ranks", [f"{ranks:,}" for ranks, *_ in speeds], columns)
    yield "the best of each:"
    for ranks, row in zip(worlds, rows, strict=True):
        yield f"  {ranks:,}: " + (f"nothing fits; {'; '.join(row.lacks)}" if row.lacks else name_of(row))
    if len(speeds) > 1:
        yield verdict(speeds)


def verdict(speeds: Sequence[tuple[int, float, MessageShare]]) -> str:
    """Of numbers of ranks with their tokens/s: up to which more pay. Twice the ranks shall give 1.5 times the speed."""
    (start, first, _), (end, last, cost) = speeds[0], speeds[-1]
    for (few, slow, _), (many, fast, share) in pairwise(speeds):
        if fast / slow < enough(many / few):
            return (
                f"more ranks pay up to {few:,}: on {many:,}, ranks would wait for messages for {share.longer:.0%} of a "
                f"step, and {many / few:g} x the ranks would give {fast / slow:.2f} x the speed"
            )
    return (
        f"more ranks pay up to {end:,} and perhaps beyond: {last / first:,.1f} x the speed of {start:,}, "
        f"and waits for messages are {cost.longer:.0%} of a step"
    )
