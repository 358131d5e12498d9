"""Whether more ranks pay, from a timeline: the time in which a step does nothing but communicate."""

from __future__ import annotations

from collections.abc import Iterable

from zero.show.run import Run

_OURS = ("update", "read")  # waits of these are for the rank's own work


def pays(run: Run) -> list[str]:
    """Sentences: the share of exposed communication, the speedup that it leaves, and a verdict."""
    world = run.facts.get("world", len(run.ranks))
    if world == 1:
        return ["One rank: there is nothing to communicate, and nothing to compare with."]
    spans = [rank.last("timeline").get("spans") for rank in run.ranks]
    shares = [exposed(each) for each in spans if each]
    if not shares:
        return [f"Not known for these {world} ranks: the folder has no timeline of a step, from which it is read."]
    share = sum(shares) / len(shares)
    speedup = world * (1 - share)
    verdict = (
        "Parallel does not pay here: one process alone would be as fast." if speedup <= 1 else
        "Parallel hardly pays: most of a step is communication." if share > 0.5 else
        "Parallel pays, though communication takes a good part of each step." if share > 0.2 else
        "Parallel pays, and more ranks would likely pay, too."
    )  # fmt: skip
    return [
        f"{share:.0%} of a step is communication that nothing hides, waits for slower ranks among it (mean of "
        f"{len(shares)} rank(s)).",
        f"That leaves {speedup:.2g} times the speed of one process, where a rank computes as fast as one process alone "
        "does; ranks that share cores or memory do not.",
        verdict,
    ]


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
