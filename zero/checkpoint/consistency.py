"""Whether an index agrees with itself: it is asked before anything is read by it. Nothing here touches a file."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from zero.checkpoint.index import FILE, Index, SavedParameter
from zero.plan.cut import Cut, whole
from zero.plan.formats import BLOCK

DEEPEST = 200  # containers inside each other; beyond it Python's JSON gives up at some depth

_DEEP = 3 * DEEPEST + 3  # JSON that `plain_values` may make of so many
_MOMENTS = ("fp64", "fp32", "bf16", "uint8")


def problems(index: Index) -> list[str]:
    """Why this is no whole checkpoint, as far as the index alone tells; empty for a whole one."""
    found = [f"{what}: {problem}" for what, stored in index.stored() if (problem := stored.problem(index.files))]
    for name, parameter in index.parameters.items():
        found += [f"{what} of '{name}' {problem}" for what, problem in _of_parameter(index, parameter)]
    for other, name in index.tied.items():
        if name not in index.parameters or other in index.parameters:
            found.append(f"'{other}' is tied to '{name}', and the parameters must have the second name only")
    found += [f"'{name}' is among `excluded` and `parameters`" for name in index.excluded if name in index.parameters]
    for name in index.files:
        _, rank, of, save = re.fullmatch(FILE, name).groups()
        if int(rank) >= int(of) or int(of) != index.world_size or save != index.save:
            found.append(f"{name} is no file of save {index.save} of {index.world_size} ranks")
    return [*found, *_of_values(index)]


def named_tensors(value: Any) -> tuple[set[str], int]:
    """The names of the tensors in what `plain_values.encode` gave, and how deep its JSON is."""
    names, depth, level = set(), 0, [value]
    while level:
        below: list[Any] = []
        for each in level:
            if isinstance(each, list):
                below += each
            elif isinstance(each, dict):
                below += each.values()
                names.update(each[form] for form in ("$tensor", "$array") if isinstance(each.get(form), str))
        level, depth = below, depth + 1
    return names, depth


def _of_parameter(index: Index, parameter: SavedParameter) -> Iterator[tuple[str, str]]:
    """What of the state behind a parameter does not fit its weight: which, and why."""
    shape, numel = parameter.weight.shape, parameter.weight.numel
    for what, stored in parameter.tensors():
        if not what.startswith("scales.") and stored.shape != shape:
            yield what, f"has shape {stored.shape}, and the weight {shape}"
    master = parameter.master
    if master is not None and master.dtype != "fp32" and (master.dtype, parameter.weight.dtype) != ("int16", "bf16"):
        yield "master", f"is {master.dtype}, and the weight {parameter.weight.dtype}"
    for key, stored in parameter.moments.items():
        if stored.dtype not in _MOMENTS:
            yield key, f"is {stored.dtype}; wanted {', '.join(_MOMENTS)}"
        if (stored.dtype == "uint8") != (key in parameter.scales):
            yield key, f"is {stored.dtype}, and {'has' if key in parameter.scales else 'lacks'} scales"
        if stored.dtype == "uint8" and key not in index.signed:
            yield key, "is uint8, and `signed` does not have it"
    for key, stored in parameter.scales.items():
        if key == "rows":  # of its matrices
            fits = len(stored.shape) == 1 and not (numel % stored.numel if stored.numel else numel)
        else:
            blocks = (
                Cut(shape, (whole(shape),)).in_blocks(BLOCK).shape if shape and stored.boxes else (-(-numel // BLOCK),)
            )
            fits = key in parameter.moments and stored.shape == blocks
        if stored.dtype != "fp32" or not fits:
            yield f"scales.{key}", f"is {stored.dtype} of shape {stored.shape}, which are no scales of {shape}"
    step = parameter.numbers.get("step", 0)
    if step < 0 or step != math.floor(step):
        yield "step", f"is {step}"
    if index.stripped and (parameter.master or parameter.moments or parameter.scales or parameter.numbers):
        yield "state", "is there, though the index says that it was deleted"


def _of_values(index: Index) -> Iterator[str]:
    """What is wrong with all that is no tensor, and with the tensors that it names."""
    shared, ranks = index.shared or {}, [each or {} for each in index.ranks]
    states = {"the engine": "state" in shared, **{f"rank {at}": "state" in each for at, each in enumerate(ranks)}}
    if len(set(states.values())) > 1 or ("state" in shared) != ("extra_state" in shared):
        yield f"there is no state of {', '.join(who for who, there in states.items() if not there) or 'modules'}"
    used: set[str] = set()
    parts: Mapping[str, Any] = {
        "engine_state": shared.get("state"),
        "extra_state": shared.get("extra_state"),
        "client_state": index.client,
        **{f"rank_state/{at}": each.get("state") for at, each in enumerate(ranks)},
    }
    for what, value in parts.items():
        names, depth = named_tensors(value)
        used |= names
        if depth > _DEEP:
            yield f"{what} is {depth} levels deep; wanted at most {_DEEP}"
    if (depth := named_tensors(index.config)[1]) > _DEEP:
        yield f"config is {depth} levels deep; wanted at most {_DEEP}"
    for rank, each in enumerate(ranks):
        for name, other in each.get("buffers", {}).items():
            used.add(other)
            there, here = index.buffers.get(name), index.tensors.get(other)
            if there is None or (here is not None and (there.shape, there.dtype) != (here.shape, here.dtype)):
                yield f"buffer '{name}' of rank {rank} has another shape or dtype than rank 0's, or rank 0 has none"
    for name in sorted(used ^ index.tensors.keys()):
        yield f"tensor '{name}' is {'used and not there' if name in used else 'there and not used'}"
