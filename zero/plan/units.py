"""Groups the parameters of a model into units.

A unit is gathered, reduced and released as one: a transformer block, an embedding, or a bucket of leftovers, once per
(dtype, requires_grad, optimizer group), because one flat buffer has one dtype, is reduced or not, and is updated with
one set of hyperparameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from zero.plan.cut import Cut
from zero.plan.grid import DENSE, UnitAxes, parts_of
from zero.plan.layout import ALIGNMENT, Layout, make_layout
from zero.plan.patterns import outermost

# A child of the root that is not a repeated block gets its own unit from this many elements on; smaller
# ones are cheaper to keep together than to send alone.
OWN_UNIT_NUMEL = 100_000


class ParamSpec(NamedTuple):
    """The facts about one parameter, as the module has it, for planning. `group`: in the optimizer; -1 for none.

    `extra_nbytes`: bytes that every rank keeps with it: the scales of a weight in 4 or 8 bits. `axes`: of the ranks
    that share it; `cut`: its part of a larger parameter, or None.
    """

    name: str
    numel: int
    dtype: str
    requires_grad: bool
    group: int
    ndim: int = 1
    extra_nbytes: int = 0
    axes: UnitAxes = DENSE
    cut: Cut | None = None

    @property
    def full_numel(self) -> int:
        """Its elements, or those of the parameter that it is a part of."""
        return self.numel if self.cut is None else self.cut.full_numel


Parts = int | Sequence[int]  # ranks that state is sharded over: for all units, or for each


def of_each(value: Parts, units: Sequence[UnitPlan]) -> Sequence[int]:
    """One value per unit, from one for all or one for each."""
    return [value] * len(units) if isinstance(value, int) else value


@dataclass(frozen=True)
class ModuleNode:
    """One module of the model: its path ("" for the root), class, own parameters by name, and children.

    `repeats`: it is a list of consecutive children (`nn.ModuleList`, `nn.Sequential`); `leaf`: everything below it is
    gathered at once; `apart`: it is gathered separately from the block around it.
    """

    path: str
    kind: str
    params: tuple[str, ...] = ()
    children: tuple[ModuleNode, ...] = ()
    repeats: bool = False
    leaf: bool = False
    apart: bool = False

    def walk(self) -> Iterator[ModuleNode]:
        """This node and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def param_names(self) -> list[str]:
        """Names of all parameters at and below this node, each once, in order of registration."""
        return list(dict.fromkeys(name for node in self.walk() for name in node.params))


@dataclass(frozen=True)
class UnitPlan:
    """One unit: the module at which it is anchored, its parameters in order, and their layout."""

    name: str
    anchor: str
    params: tuple[ParamSpec, ...]
    layout: Layout = field(repr=False)

    @property
    def dtype(self) -> str:
        """The dtype that all parameters of the unit share."""
        return self.params[0].dtype

    @property
    def requires_grad(self) -> bool:
        """Whether the unit is trained; a frozen unit is gathered but never reduced or updated."""
        return self.params[0].requires_grad

    @property
    def axes(self) -> UnitAxes:
        """The grid axes of the ranks that share the unit."""
        return self.params[0].axes

    @property
    def group(self) -> int:
        """Index of the optimizer's parameter group; -1 for none."""
        return self.params[0].group

    def on(self, world_size: int, alignment: int) -> UnitPlan:
        """The same unit for `world_size` ranks."""
        return replace(self, layout=_layout(self.params, world_size, alignment))


def plan_units(
    root: ModuleNode,
    specs: Sequence[ParamSpec],
    world_size: int,
    patterns: Sequence[str] = (),
    alignment: int = ALIGNMENT,
) -> tuple[UnitPlan, ...]:
    """Group every parameter of `specs` into exactly one unit, in order of registration.

    `patterns` are class names or fnmatch patterns on module paths that name the blocks; without them the children of
    the outermost repeating containers are the blocks. A leaf is a block of its own unless it is inside one, and modules
    inside a leaf are not blocks. A module that is `apart` is its own unit inside any block. A shared parameter belongs
    to the first module that has it. `alignment`: see `make_layout`. Raises ValueError for a pattern that matches
    nothing.
    """
    root = _untied(root, set())
    by_name = {spec.name: spec for spec in specs}
    taken: set[str] = set()
    units: list[UnitPlan] = []
    for anchor in _anchors(root, by_name, patterns):
        buckets: dict[tuple[str, bool, int, UnitAxes], list[ParamSpec]] = {}
        for name in anchor.param_names():
            if name in by_name and name not in taken:
                taken.add(name)
                spec = by_name[name]
                buckets.setdefault((spec.dtype, spec.requires_grad, spec.group, spec.axes), []).append(spec)
        for bucket in buckets.values():
            name, layout = _name(anchor, bucket, len(buckets) > 1), _layout(bucket, world_size, alignment)
            units.append(UnitPlan(name, anchor.path, tuple(bucket), layout))
    # The order in which parameters were registered, so that a reader, a checkpoint and every rank agree.
    position = {spec.name: index for index, spec in enumerate(specs)}
    return tuple(sorted(units, key=lambda unit: position[unit.params[0].name]))


def _layout(params: Sequence[ParamSpec], world_size: int, alignment: int) -> Layout:
    numels = {spec.name: spec.numel for spec in params}
    return make_layout(numels, parts_of(params[0].axes, world_size), alignment)


def _untied(node: ModuleNode, seen: set[str]) -> ModuleNode:
    """The same tree with each parameter only at the first module that has it."""
    own = tuple(name for name in dict.fromkeys(node.params) if name not in seen)
    seen.update(own)
    return replace(node, params=own, children=tuple(_untied(child, seen) for child in node.children))


def _name(anchor: ModuleNode, bucket: list[ParamSpec], several: bool) -> str:
    name = anchor.path or "<root>"
    if several:  # add what distinguishes it from its siblings
        first = bucket[0]
        traits = [first.dtype, *([] if first.requires_grad else ["frozen"])]
        if first.requires_grad or first.group >= 0:
            traits.append(f"group {first.group}")
        if first.axes != DENSE:
            traits.append(f"along {' x '.join(first.axes.shard + first.axes.parts) or 'no axis'}")
        name += f"[{', '.join(traits)}]"
    return name


def _anchors(root: ModuleNode, specs: dict[str, ParamSpec], patterns: Sequence[str]) -> list[ModuleNode]:
    """Modules that are apart, blocks, then the large leftovers, then the root with all other parameters."""
    blocks = _matching(root, patterns) if patterns else _repeated(root)
    # Before the blocks around them, which take the rest.
    blocks = [*_apart(root), *blocks]
    blocked = {node.path for block in blocks for node in block.walk()}

    def large(node: ModuleNode) -> list[ModuleNode]:
        found = []
        for child in node.children:
            if child.path in blocked:
                continue
            if any(below.path in blocked for below in child.walk()):
                found += large(child)
            elif sum(specs[name].full_numel for name in child.param_names() if name in specs) >= OWN_UNIT_NUMEL:
                found.append(child)
        return found

    return [*blocks, *large(root), root]


def _apart(node: ModuleNode) -> list[ModuleNode]:
    """The outermost modules that are apart and not inside a leaf."""
    if node.leaf:
        return []
    if node.apart:
        return [node] if node.param_names() else []
    return [found for child in node.children for found in _apart(child)]


def _repeated(node: ModuleNode) -> list[ModuleNode]:
    """Leaves, and children with parameters of the outermost lists; lists inside lists are searched."""
    if node.leaf:
        return [node] if node.param_names() else []
    blocks = []
    for child in node.children:
        if node.repeats and not child.repeats:
            blocks += [child] if child.param_names() else []
        else:
            blocks += _repeated(child)
    return blocks


def _matching(root: ModuleNode, patterns: Sequence[str]) -> list[ModuleNode]:
    """The outermost modules that are leaves or whose class or path one of the patterns names."""
    nodes = {node.path: node for node in root.walk()}
    leaves = {path for path, node in nodes.items() if node.leaf}
    paths = outermost("zero.units", [(path, node.kind) for path, node in nodes.items()], patterns, leaves)
    return [nodes[path] for path in paths if nodes[path].param_names()]
