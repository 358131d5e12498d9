"""What a checkpoint holds against what an engine has: which name is loaded from which, and all that does not fit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from zero.checkpoint.index import Index, SavedParameter, Stored

FLOATS = ("fp64", "fp32", "bf16", "fp16")


class TargetParameter(NamedTuple):
    """One parameter of an engine.

    names:   all that it has in the model, that of its unit first;
    group:   of the optimizer; None for a frozen one;
    moments, numbers: torch's names of its states.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    unit: str = ""
    group: int | None = None
    moments: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()


class Ask(NamedTuple):
    """What is to be loaded.

    states:   moments and numbers of the optimizer, too;
    strict:   names must agree, else `argument` is what the user may set to False;
    weights:  False where they come in by another way;
    masters:  exact values from masters, not from what the model computed with;
    left_out: frozen parameters that the checkpoint need not have;
    elsewhere: names that other ranks have, and this one has not.
    """

    states: bool = False
    strict: bool = True
    weights: bool = True
    masters: bool = True
    left_out: Collection[str] = ()
    elsewhere: Collection[str] = ()
    argument: str = "strict"


@dataclass
class Match:
    """What is loaded, and what is to be said of it.

    names:    of parameters of the engine -> of the checkpoint;
    doubles:  of parameters that are several in the checkpoint -> the others there, which must have equal values;
    fresh:    parameters that were frozen there and are trained here, so that their states begin anew;
    buffers:  names that both have;
    left_out: frozen parameters that a save was told to leave out, which keep what they have;
    missing, unexpected: names that only one of the two has;
    misfits, states: lines on shapes and dtypes, and on the state of the optimizer.
    """

    names: dict[str, str] = field(default_factory=dict)
    doubles: dict[str, tuple[str, ...]] = field(default_factory=dict)
    fresh: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def problem(self, ask: Ask) -> str | None:
        """All differences that stand against loading, a line for each kind; None where nothing does."""
        lines = []
        if ask.strict and ask.weights:
            lines += [f"not in the checkpoint: {_names(self.missing)}"] if self.missing else []
            lines += [f"not in the model: {_names(self.unexpected)}"] if self.unexpected else []
            if lines:
                lines.append(f"{ask.argument}=False loads what both have")
        lines += self.misfits if ask.weights else []
        if self.states:
            lines += [*self.states, "load_optimizer_states=False loads the weights, and the optimizer begins anew"]
        return "\n  ".join(lines) if lines else None


def compare(
    index: Index, wanted: Iterable[TargetParameter], buffers: Mapping[str, tuple[tuple[int, ...], str]], ask: Ask
) -> Match:
    """What of the checkpoint goes where. `buffers` of the engine: name -> shape and dtype."""
    match, used, wanted = Match(), set(), list(wanted)
    for each in wanted:
        # Several where it was not tied there.
        there = dict.fromkeys(index.tied.get(name, name) for name in each.names)
        sources = [name for name in there if name in index.parameters]
        used.update(sources)
        if sources:
            _fit(match, index, each, sources, ask)
        elif each.group is None and each.names[0] in ask.left_out:
            match.left_out.append(each.names[0])
        else:
            match.missing.append(each.names[0])
    match.unexpected += [name for name in index.parameters if name not in used]
    _fit_buffers(match, index.buffers, buffers)
    tied = {index.tied.get(name, name) for name in ask.elsewhere}
    match.unexpected = [name for name in match.unexpected if name not in tied]
    if ask.states and index.stripped:
        match.states.append("its masters and moments have been deleted to save room (zero.checkpoint.keep_optimizer)")
    elif ask.states:
        _fit_groups(match, index, wanted)
        _fit_numbers(match, index, wanted)
    if not ask.strict:
        if match.missing:
            match.warnings.append(f"not in the checkpoint, so these keep what they have: {_names(match.missing)}")
        if match.unexpected:
            match.warnings.append(f"not in the model, so these are left out: {_names(match.unexpected)}")
    if match.fresh:
        match.warnings.append(f"no state of the optimizer for these, so theirs begins anew: {_names(match.fresh)}")
    return match


def stateless(parameter: SavedParameter) -> bool:
    """Whether there is no state of an optimizer because none has taken a step with the parameter."""
    return not parameter.moments and (parameter.group is None or not parameter.numbers.get("step"))


def _fit(match: Match, index: Index, each: TargetParameter, sources: list[str], ask: Ask) -> None:
    """Whether one parameter can take what the checkpoint has of it."""
    name, source = each.names[0], index.parameters[sources[0]]
    problem = _misfit(source.weight, each.shape, each.dtype)
    if problem is not None:
        match.misfits.append(f"'{name}' {problem}")
        return
    match.names[name] = sources[0]
    if len(sources) > 1:
        match.doubles[name] = tuple(sources[1:])
    if not ask.states or index.stripped or each.group is None or not source.weight.numel:
        return
    if stateless(source):
        match.fresh += [name] if source.group is None else []
    elif set(source.moments) != set(each.moments):
        match.states.append(f"'{name}' has {_states(source.moments)} there and {_states(each.moments)} here")
    elif lacking := sorted((set(each.numbers) ^ set(source.numbers)) - {"step"}):
        match.states.append(f"'{name}' has the numbers {lacking} of the optimizer only there or only here")


def _misfit(stored: Stored, shape: tuple[int, ...], dtype: str) -> str | None:
    if stored.shape != shape:
        return f"has shape {shape}, in the checkpoint {stored.shape}"
    if stored.dtype != dtype and not (stored.dtype in FLOATS and dtype in FLOATS):
        return f"is {dtype}, in the checkpoint {stored.dtype}, which cannot be converted"
    return None


def _fit_buffers(
    match: Match, stored: Mapping[str, Stored], buffers: Mapping[str, tuple[tuple[int, ...], str]]
) -> None:
    match.unexpected += [name for name in stored if name not in buffers]
    for name, (shape, dtype) in buffers.items():
        if name not in stored:
            match.missing.append(name)
        elif problem := _misfit(stored[name], shape, dtype):
            match.misfits.append(f"buffer '{name}' {problem}")
        else:
            match.buffers.append(name)


def _fit_groups(match: Match, index: Index, wanted: Iterable[TargetParameter]) -> None:
    """Whether parameters that are trained in both are in the same parameter groups."""
    moved: dict[tuple[int, int], list[str]] = {}
    for each in wanted:
        there = index.parameters[match.names[each.names[0]]].group if each.names[0] in match.names else None
        if there is not None and each.group is not None and there != each.group:
            moved.setdefault((there, each.group), []).append(each.names[0])
    for (there, here), names in moved.items():
        match.states.append(f"in parameter group {there} there and in group {here} here: {_names(names)}")
    if moved:
        match.states.append("initialize() with the parameter groups of then, in their order, loads it whole")


def _fit_numbers(match: Match, index: Index, wanted: Iterable[TargetParameter]) -> None:
    """A unit has one number of steps; what it takes together must have the same."""
    seen: dict[str, tuple[str, Mapping[str, float]]] = {}
    for each in wanted:
        source = index.parameters.get(match.names.get(each.names[0], ""))
        if source is None or each.group is None or stateless(source):
            continue
        first, numbers = seen.setdefault(each.unit, (each.names[0], source.numbers))
        if numbers != source.numbers:
            match.states.append(
                f"'{first}' and '{each.names[0]}', which are updated together in unit '{each.unit}', have different "
                f"numbers of the optimizer: {dict(numbers)} and {dict(source.numbers)}"
            )


def _states(names: Collection[str]) -> str:
    return f"the moments {', '.join(sorted(names))}" if names else "no moments"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
