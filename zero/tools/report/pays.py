"""Whether more ranks pay, from a timeline: the time in which a step does nothing but communicate."""

from __future__ import annotations

from collections.abc import Iterable

from zero.log import counted
from zero.tools.report.written_run import WrittenRun

UNKNOWN = "From this alone it cannot be said whether parallel pays"
_OURS = ("update", "read")  # waits of these are for the rank's own work


def pays(run: WrittenRun) -> list[str]:
    """Sentences: the share of exposed communication, the speedup that it leaves, and a verdict."""
    world = run.facts.get("world", len(run.ranks))
    if world == 1:
        return ["One rank: there is nothing to communicate, and nothing to compare with."]
    spans = [rank.last("timeline").get("spans") for rank in run.ranks]
    shares = [exposed(each) for each in spans if each]
    if not shares:
        return [f"Not known for these {world} ranks: the folder has no timeline of a step, from which it is read."]
    share, crowding = sum(shares) / len(shares), run.facts.get("crowding", 0.0)
    speedup = world * (1 - share) / max(1.0, crowding)
    shared = f", and {crowding:.2g} threads share each core" if crowding > 1 else ""
    verdict = (
        "Parallel does not pay here: one process alone would be as fast." if speedup <= 1 else
        "Parallel hardly pays: most of what further ranks could give is lost." if speedup < enough(world) else
        f"{UNKNOWN}: no core is left for messages, and what busy cores take from each other is not in a timeline. "
        "`zero plan` can: its rates are measured beside as many ranks." if crowding >= 1 else
        "Parallel pays, though communication takes a good part of each step." if share > 0.2 else
        "Parallel pays, and more ranks would likely pay, too."
    )  # fmt: skip
    return [
        f"{share:.0%} of a step is communication that nothing hides, waits for slower ranks among it (mean of "
        f"{counted(len(shares), 'rank')}){shared}.",
        f"That leaves {speedup:.2g} times the speed of one process with as many threads, where a core computes as fast "
        "beside busy ones as alone; ranks that share the memory's bandwidth do not.",
        verdict,
    ]


def enough(ranks: float) -> float:
    """From which speed beside one process `ranks` pay: half of what each further one could give."""
    return 1 + (ranks - 1) / 2


def exposed(spans: Iterable[tuple[str, str, float, float]]) -> float:
    """The part, in [0, 1], of a step in which it waits for messages, or a GPU's streams carry nothing but them."""
    spans = list(spans)
    on_gpu = [span for span in spans if span[0].startswith("GPU")]
    edges = []
    for _, name, begin, end in on_gpu or spans:
        verb, _, what = name.partition(" ")
        talks = verb in ("gather", "reduce") if on_gpu else verb == "wait" and what.partition(" ")[0] not in _OURS
        edges += [(begin, talks, 1), (end, talks, -1)] if talks or on_gpu else []
    alone, before, open_ = 0.0, 0.0, [0, 0]
    for at, talks, step in sorted(edges):
        alone += at - before if open_[True] and not open_[False] else 0.0
        open_[talks] += step
        before = at
    return alone / (max(span[3] for span in spans) - min(span[2] for span in spans))
