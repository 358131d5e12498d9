"""What people ask of a plan, by name (pytorch issue 125323), answered by rows that differ in one thing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from zero.config import load
from zero.config.override import apply
from zero.plan.formats import ITEMSIZE
from zero.recompute.policy import Cost, choose
from zero.sizes.choice import DEVICE, HOST
from zero.sizes.cost import LOSS, POLICIES
from zero.sizes.estimate import GB, STEP, Row
from zero.sizes.lines import gigabytes, table_lines
from zero.sizes.search import Line, Search, Setup, pattern_of
from zero.sizes.table import longest, tokens, waits

_LARGEST = 8  # lines of what holds memory


class Case(NamedTuple):
    """A run that is asked about."""

    setup: Setup
    row: Row

    def row_of(self, policy: str | None = None, micro_batch: int | None = None, **choice: Any) -> Row:
        """The same run with another policy, micro-batch or choice."""
        search = Search(self.setup, self.row.choice._replace(**choice))
        return search.row(policy or self.row.policy, micro_batch or self.row.micro_batch)

    def set(self, sets: Mapping[str, Any], **choice: Any) -> Row:
        """The same run with other values in the JSON, by key with dots."""
        values = apply(self.setup.settings.raw, self.row.overrides() | dict(sets))
        setup = replace(self.setup, settings=load(values, self.setup.ranks, filled=False))
        if self.setup.recost is not None:
            setup = replace(setup, cost=self.setup.recost(setup.settings))
        return Case(setup, self.row).row_of(**choice)

    def moments(self) -> list[Line]:
        """Bytes at each moment at which the most may be alive."""
        return Search(self.setup, self.row.choice).lines(self.row.policy, self.row.accumulation)


Answer = Iterator[str]


def _compared(case: Case, rows: Mapping[str, Row]) -> Answer:
    """A line for each, beside the row that was asked about; what does not fit has the name of what is too little."""
    rows = {"as it is": case.row, **rows}
    columns = {
        "peak GB": [gigabytes(row.peak) for row in rows.values()],
        "": [f"{row.peak / case.row.peak - 1:+.0%}" if row is not case.row else "" for row in rows.values()],
        "GB sent": [gigabytes(row.links.sent) for row in rows.values()],
        "s/step": [f"{row.step.step:,.3f}" for row in rows.values()],
        "tokens/s": [f"{tokens(case.setup, row):,.0f}" for row in rows.values()],
        "fits": [", ".join(lack.partition(":")[0] for lack in row.lacks) or "yes" for row in rows.values()],
    }
    yield from table_lines("", [f"  {label}" for label in rows], columns)


def _best(rows: Mapping[str, Row]) -> str:
    """The label of the fastest that fits."""
    fitting = {label: row for label, row in rows.items() if not row.lacks}
    per_sample = {label: row.step.step / (row.micro_batch * row.accumulation) for label, row in fitting.items()}
    return min(per_sample, key=per_sample.__getitem__) if fitting else "none"


def _peak(case: Case) -> Answer:
    row = case.row
    at, state, alive = max(case.moments(), key=lambda line: line.state + line.sample * row.micro_batch)
    when = {LOSS: "in head and loss", STEP: "in the optimizer's step"}.get(at, f"in the backward of '{at or '<root>'}'")
    yield f"  {row.peak / GB:,.2f} GB, {when}: {state / GB:,.2f} state, {alive * row.micro_batch / GB:,.2f} activations"
    kinds = zip(row.device._fields, row.device, strict=True)
    yield "  each kind at its own most: " + ", ".join(f"{kind} {nbytes / GB:,.2f}" for kind, nbytes in kinds if nbytes)


def _units(case: Case) -> Answer:
    blocks = case.setup.blocks
    kinds = {
        "one unit for each list": ["*"],
        "what is in a block, each": [f"{pattern}.*" for pattern in blocks],
    }
    rows = {}
    for label, patterns in kinds.items():
        try:
            rows[label] = case.set({"zero.units": patterns})
        except ValueError:  # there is no such module
            continue
    rows["nothing ahead"] = case.set({"zero_optimization.stage3_prefetch_bucket_size": 0})
    yield from _compared(case, rows)
    if not case.row.device.gathered:
        yield "  Parameters are whole all the time: units decide over messages, and over gradients on their way."


def _batch(case: Case) -> Answer:
    search = Search(case.setup, case.row.choice)
    rows = {f"micro-batch {size}": search.row(case.row.policy, size) for size in search.sizes(case.row.policy)}
    yield from _compared(case, rows)
    yield f"  fastest: {_best(rows)}; the largest that fits is {search.largest(case.row.policy)}"


def _sequence(case: Case) -> Answer:
    for policy in POLICIES:
        length, *_ = longest(case.setup, [case.row.choice], [policy])
        yield f"  recompute {policy:<10} {max(0, length):>12,} tokens at micro-batch 1"


def _ranks(case: Case) -> Answer:
    ranks = case.setup.ranks
    others = (count for count in (ranks // 4, ranks // 2, 2 * ranks, 4 * ranks) if count)
    choice = case.row.choice
    rows = {
        f"{count:,} rank{'s' * (count > 1)}": Case(case.setup.on(count), case.row).row_of()
        for count in others
        if count % (choice.shard_size or 1) == 0 and count % choice.secondary == 0
    }
    yield from _compared(case, rows)


def _offload(case: Case) -> Answer:
    stage = max(1, case.row.choice.stage)
    here = case.row_of(stage=stage, optimizer=DEVICE, params=DEVICE)
    host = case.row_of(stage=stage, optimizer=HOST, params=DEVICE)
    yield from _compared(case, {f"stage {stage}, on the device": here, f"stage {stage}, on the host": host})
    yield (
        f"  the optimizer on the CPU frees {(here.peak - host.peak) / GB:,.2f} GB of the device, takes "
        f"{host.host.memory / GB:,.2f} GB of the host and {host.step.step / here.step.step:.2f} x the time"
    )


def _policies(case: Case) -> Answer:
    rows = {policy: case.row_of(policy) for policy in POLICIES}
    yield from _compared(case, rows)
    largest = {p: Search(case.setup, case.row.choice).largest(p) for p in POLICIES}
    yield "  largest micro-batches: " + ", ".join(f"{policy} {size:,}" for policy, size in largest.items())
    yield f"  take {_best(rows)} at micro-batch {case.row.micro_batch}: the fastest that fits"


def _mixed(case: Case) -> Answer:
    """By the choice that the engine's own policy "auto" makes."""
    blocks = [unit for unit in case.setup.cost.units if unit.recomputable]
    size = case.row.micro_batch
    costs = {
        index: Cost(*(int(size * unit.saved[policy]) for policy in Cost._fields)) for index, unit in enumerate(blocks)
    }
    state = max(line.state for line in case.moments())
    others = sum(unit.saved["none"] for unit in case.setup.cost.units if not unit.recomputable)
    budget = int(case.setup.room - state - size * (others + max((unit.working for unit in blocks), default=0.0)))
    if not blocks or budget <= 0:
        yield "  there is nothing to choose: no block can be recomputed, or state takes all there is"
        return
    chosen = choose(list(costs), costs, budget)
    kinds = [policy.value for policy in chosen.policies.values()]
    yield (
        f"  least recomputation in {budget / GB:,.2f} GB: "
        + ", ".join(f"{kinds.count(kind)} blocks {kind}" for kind in Cost._fields if kind in kinds)
        + f"; they take {chosen.nbytes / GB:,.2f} GB{'' if chosen.nbytes <= budget else ', which is more'}"
    )
    names = {unit.name: kind for unit, kind in zip(blocks, kinds, strict=True)}
    again = case.setup.cost.recompute_flops(names) / max(1.0, case.setup.cost.flops)
    yield f"  {again:.0%} of the model's FLOPs are computed twice; all blocks in full would be " + (
        f"{case.setup.cost.recompute_flops('full') / max(1.0, case.setup.cost.flops):.0%}"
    )
    yield f'  "zero": {{"recompute": {{"modules": {case.setup.blocks}, "policy": "auto", "budget": {budget}}}}}'


def _reduction(case: Case) -> Answer:
    yield from _compared(
        case, {f"in {dtype}": case.set({"communication_data_type": dtype}) for dtype in ("fp32", "bf16")}
    )


def _precision(case: Case) -> Answer:
    kinds = {"bf16": (True, False), "fp16": (False, True), "fp32": (False, False)}
    rows = {}
    for name, (bf16, fp16) in kinds.items():
        try:
            rows[name] = case.set({"bf16.enabled": bf16, "fp16.enabled": fp16})
        except ValueError as error:
            yield f"  {name}: {error}"
    if case.setup.settings.optimizer is not None:
        rows["moments in 8 bit"] = case.set({"optimizer.params.zero": {"moments": "8bit"}})
    yield from _compared(case, rows)


def _mesh(case: Case) -> Answer:
    """HSDP and hpZ are the smaller meshes that there are."""
    inside = case.setup.per_host
    if not 1 < inside < case.setup.ranks or case.setup.ranks % inside:
        yield f"  all {case.setup.ranks} ranks are on one host: there is no smaller mesh to send less between hosts"
        return
    stage = max(1, case.row.choice.stage)
    rows = {
        f"stage {stage} on all ranks": case.row_of(stage=stage, shard_size=0, secondary=1),
        f"HSDP, {inside} ranks": case.row_of(stage=stage, shard_size=inside, secondary=1),
        f"hpZ, {inside} ranks": case.row_of(stage=3, shard_size=0, secondary=inside),
    }
    yield from _compared(case, rows)
    for label, row in rows.items():
        share = waits(case.setup, row).longer
        yield f"  {label}: {row.links.inter_host / GB:,.2f} GB between hosts, {share:.0%} of a step is communication"
    yield f"  fastest that fits: {_best(rows)}"


def _keep(case: Case) -> Answer:
    numel = 2 * sum(unit.layout.numel for unit in case.setup.units)  # from the forward's first use to the last one
    row = case.set({"zero_optimization.stage3_max_reuse_distance": numel}, stage=3)
    yield from _compared(case, {"released after forward": case.row_of(stage=3), "kept until backward": row})


def _shares(parts: Iterable[tuple[str, float]]) -> Answer:
    """The largest, those of one list together."""
    lists = defaultdict(list)
    for name, nbytes in parts:
        lists[pattern_of(name) or "<root>"].append(nbytes)
    ordered = sorted(lists.items(), key=lambda item: -sum(item[1]))
    whole = sum(map(sum, lists.values())) or 1.0
    for name, nbytes in ordered[:_LARGEST]:
        each = f", each {max(nbytes) / GB:,.3f} at most" if len(nbytes) > 1 else ""
        yield f"  {name:<40} {sum(nbytes) / GB:9,.3f} GB  {sum(nbytes) / whole:4.0%}{each}"


def _activations(case: Case) -> Answer:
    policy, size, cost = case.row.policy, case.row.micro_batch, case.setup.cost
    parts = [(unit.name, size * unit.saved[policy]) for unit in cost.units]
    yield from _shares([*parts, ("head and loss", size * cost.logits)])


def _holders(case: Case) -> Answer:
    units = case.setup.units
    yield "  whole, while they are used:" if case.row.device.gathered else "  whole, all the time:"
    yield from _shares((unit.name, ITEMSIZE[unit.dtype] * unit.layout.numel) for unit in units)


def _frees(case: Case) -> Answer:
    cost, size = case.setup.cost, case.row.micro_batch
    blocks = [unit for unit in cost.units if unit.recomputable]
    none, full = case.row_of("none"), case.row_of("full")
    yield from _compared(case, {"none": none, "full": full})
    kept = size * sum(unit.saved["none"] for unit in blocks)
    one = size * max((unit.saved["none"] + unit.working for unit in blocks), default=0.0)
    other = size * sum(unit.saved["none"] for unit in cost.units if not unit.recomputable)
    yield f"  blocks keep {kept / GB:,.2f} GB without recomputation; others keep {other / GB:,.2f} under every policy"
    yield f"  in its backward one block at a time is whole again: {one / GB:,.2f} GB"
    yield f"  head and loss take {size * cost.logits / GB:,.2f} GB; zero.tiled_cross_entropy never has logits whole"
    least = max(case.moments(), key=lambda line: line.state).state
    yield f"  state takes up to {least / GB:,.2f} GB, which no policy changes"


ASKS: Mapping[str, tuple[str, Callable[[Case], Answer]]] = {
    "peak": ("What is the peak now?", _peak),
    "units": ("What do other units do to it?", _units),
    "batch": ("Which micro-batch is best?", _batch),
    "sequence": ("How long may a sequence be?", _sequence),
    "ranks": ("What do more or fewer data-parallel ranks do?", _ranks),
    "offload": ("What does the optimizer on the CPU save?", _offload),
    "recompute": ("Which policy of recomputation?", _policies),
    "mixed": ("Which policy for which unit?", _mixed),
    "reduction": ("What does a reduction in fp32 do?", _reduction),
    "precision": ("What does another precision do?", _precision),
    "hsdp": ("When does HSDP pay, and may parameters be cut over fewer ranks?", _mesh),
    "keep": ("May parameters stay whole after the forward?", _keep),
    "activations": ("Where are most activations?", _activations),
    "holders": ("Which unit holds the memory?", _holders),
    "frees": ("Why does recomputation free so little?", _frees),
}


def answer(name: str, setup: Setup, row: Row) -> Answer:
    """The answer to one question, or to "all"."""
    for question, reply in ASKS.values() if name == "all" else [ASKS[name]]:
        yield question
        yield from reply(Case(setup, row))
