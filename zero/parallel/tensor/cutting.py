"""Cuts a model as a plan says: slices of the first rank's values, forwards that move what goes through, and back."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zero.config import Config
from zero.config.tensor_parallel import TensorParallel
from zero.core.comm import Axis, local_device
from zero.core.mesh import Meshes
from zero.core.owner import cut_of
from zero.parallel.division import Division
from zero.parallel.pipeline.split import Elsewhere
from zero.parallel.tensor.first_step import FirstForward, FirstStep, broadcast_batch, compare_batch
from zero.parallel.tensor.forward import (
    CutForward,
    Regions,
    Replaced,
    Scope,
    Section,
    TokenDropout,
    Trunk,
    has_dropout,
)
from zero.parallel.tensor.layers import Layer, set_widths
from zero.parallel.tensor.plan import TensorPlan, tensor_plan
from zero.parallel.tensor.styles import OF_MODEL
from zero.parallel.tensor.tree import NoDraws, TreeForward, check_blocks
from zero.plan.patterns import is_inside


class CutModel(Division):
    """A model whose layers are cut over the ranks along tp, until `restore`."""

    RECORD, WHAT = "_zero_cut_model", "layers"

    def __init__(
        self,
        model: nn.Module,
        plan: TensorPlan,
        meshes: Meshes,
        section: TensorParallel,
        stage_of: Mapping[str, int],
    ) -> None:
        """Collective over the axis: all ranks take the values of its first one. stage_of: of modules of a pipeline."""
        super().__init__(model, plan.places, meshes.along("tp"))
        self.plan, self.stage_of, self._broadcasts = plan, stage_of, section.broadcast_batch
        self._compared = self.axis.size == 1
        self.blocks = section.blocks if section.reduce == "tree" else 0
        self._first: FirstStep | None = None
        self.whole = False  # whether all of it is as planned: else parameters are in parts, and no layer knows
        if self.axis.size > 1:
            params = [each for each in model.named_parameters() if cut_of(each[1]) is None]  # of no other axis
            self._cut(params, meshes)
        self.forwards, scopes = replaced(model, plan, self.axis, self.blocks, stage_of)
        self.sections = [each for each in self.forwards if isinstance(each, Section)]
        self._changed = set_counts(model, plan)
        if self.axis.size > 1 and not plan.source.startswith(OF_MODEL):
            self._compare_first(scopes)
        if self.axis.size > 1:
            self._first = FirstStep(model, plan, self.axis)
        self.whole = True

    def attach(self, meshes: Meshes, section: TensorParallel) -> None:
        """The model has an engine, perhaps another one than before, whose ranks are the same."""
        self.axis, self._broadcasts = meshes.along("tp"), section.broadcast_batch
        for forward in self.forwards:
            forward.axis = self.axis
        if self._first is not None:
            self._first.axis = self.axis

    def begin(self, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        """The batch of a forward, which ranks along the axis share; the first is compared, or all are sent."""
        if self._broadcasts:
            return broadcast_batch((inputs, kwargs), self.axis)
        if not self._compared:
            or_else = ', or set "tensor_parallel": {"broadcast_batch": true}, which sends them that of the first'
            compare_batch((inputs, kwargs), self.axis, "tensor_parallel", or_else)
            self._compared = True
        return inputs, kwargs

    def misfit(self, error: BaseException) -> str | None:
        """The text for an exception of a forward before the first step; None for one that says enough itself."""
        if self._first is None or not isinstance(error, (RuntimeError, IndexError)) or "tensor_parallel" in str(error):
            return None
        what = f"a forward of {type(self._model).__name__}, cut as {self.plan.source} says, failed: {error}"
        then = "If the plan does not fit the code of the model, say another by tensor_parallel.partition_config"
        return f"tensor_parallel: {what}. {then}"

    def see(self, loss: torch.Tensor) -> None:
        """A loss that the engine is given; the first is compared before the first step."""
        if self._first is not None and self._first.loss is None:
            self._first.loss = loss.detach().clone()

    def before_step(self) -> None:
        """Gradients are there: the first are compared; what was seen of sections by then holds from now on."""
        if self._first is not None:
            first, self._first = self._first, None
            first.compare()
            for section in self.sections:
                section.scatters = section.learned

    def _compare_first(self, scopes: Mapping[str, Scope]) -> None:
        """Have blocks that are cut by names of layers be compared at their first forward."""
        for name, scope in scopes.items():
            blocks = [block for block in self.plan.blocks if block.scope == name]
            layers = [layer for block in blocks for layer in block.layers]
            if not layers or any(layer.param for layer in layers):
                continue  # what reads a parameter of its own has a part of it
            cut = {(module, each) for layer in layers for module, each, _ in layer.widths}
            cut |= {(module, each) for module, each, block in self.plan.counted if block in blocks}
            whole = [each for each in self._changed if each[:2] in cut]
            scope.first = FirstForward(name, [layer.name for layer in layers], whole, self.plan.source).compare

    def restore(self, alone: bool = False) -> None:
        """As of any division; what was to be compared is not."""
        if self._first is not None:
            self._first.close()
        super().restore(alone)


def replaced(
    model: nn.Module, plan: TensorPlan, axis: Axis, blocks: int, stage_of: Mapping[str, int]
) -> tuple[list[Replaced], dict[str, Scope]]:
    """Replace the forwards of what a plan cuts; returns the replacements, and the blocks among them by name.

    blocks: of each product, 0 for none; stage_of: of modules of a pipeline, by name.
    """
    here = _here(model)
    regions = (NoDraws if blocks else Regions)(axis, local_device())

    def dropping(scope: str) -> Regions | None:
        return regions if has_dropout(list(here[scope].modules())) else None

    def forward(layer: Layer, *where: Any) -> CutForward:
        return TreeForward(layer, axis, where[0], blocks) if blocks else CutForward(layer, axis, *where)

    found: list[Replaced] = []
    sections: dict[str, Section] = {}
    # What goes to another stage is whole, wherever that lies.
    for _, stage in itertools.groupby((name for name in plan.trunk if name in here), stage_of.get):
        names = [*stage]
        trunk = Trunk(here[names[0]], here[names[-1]], axis)
        found += trunk.ends
        for name in (name for name in here if any(is_inside(name, block) for block in names)):
            if name in plan.sections:
                sections[name] = Section(here[name], axis, dropping(name), trunk)
            elif isinstance(here[name], nn.Dropout) and not any(is_inside(name, each) for each in plan.sections):
                found.append(TokenDropout(here[name], axis, regions, trunk))
    found += sections.values()
    scopes: dict[str, Scope] = dict(sections)
    for block in (block for block in plan.blocks if block.scope in here):
        around = next((each for name, each in sections.items() if is_inside(block.scope, name)), None)
        if block.scope not in scopes:
            scopes[block.scope] = Scope(here[block.scope], axis, dropping(block.scope), around)
            found.append(scopes[block.scope])
        inside = (layer for layer in block.layers if layer.name in here and not layer.param)
        found += [forward(layer, scopes[block.scope], around) for layer in inside]
    alone = (layer for layer in plan.alone if layer.name in here and not layer.param)
    found += [forward(layer, None, None) for layer in alone if layer.style.takes or layer.style.gives]
    return found, scopes


def set_counts(model: nn.Module, plan: TensorPlan) -> list[tuple[nn.Module, str, Any]]:
    """Have attributes that say widths, or count heads, say those of this rank; and what they were."""
    here, changed = _here(model), list[tuple[nn.Module, str, Any]]()
    for layer in plan.layers:
        if layer.name in here and layer.divided and not layer.param:
            set_widths(layer, changed)
    for module, name, block in plan.counted:
        value = getattr(module, name, None)
        if not isinstance(value, int) or value <= 0:
            continue
        shares = sorted((layer.share for layer in block.layers), key=lambda each: -each.groups)
        if name == "num_key_value_groups":  # each rank has one head of keys, and these of queries
            mine = shares[0].count
        else:  # of heads, those of queries or, if these are fewer, of keys
            mine = next((each.of(value)[1] for each in shares if value % each.groups == 0), value)
        changed.append((module, name, value))
        setattr(module, name, mine)
    return changed


def _here(model: nn.Module) -> dict[str, nn.Module]:
    return {name: each for name, each in model.named_modules() if not isinstance(each, Elsewhere)}


def planned(model: nn.Module, settings: Config, rank: int, apart: Sequence[str] = ()) -> TensorPlan | CutModel | None:
    """The plan by which to cut the model; None where it is not, or by hand; the record where by another engine.

    apart: modules that are divided otherwise. One rank has the blocks of a tree, too. Raises ValueError for what
    cannot be cut.
    """
    ranks = settings.grid.ranks("tp", rank)
    if len(ranks) == 1 and settings.tensor_parallel.reduce != "tree":
        return None
    if (before := model.__dict__.get(CutModel.RECORD)) is not None:
        blocks = settings.tensor_parallel.blocks * (settings.tensor_parallel.reduce == "tree")
        same = (before.plan.rank, before.plan.ranks, before.blocks) == (ranks.index(rank), len(ranks), blocks)
        if not (same and before.whole):
            raise ValueError(
                f"initialize(): this model was cut over {before.plan.ranks} ranks, for an engine that was dropped or "
                "could not be made, and this JSON says otherwise, or not all of it was cut; make the model anew, and "
                "call destroy() of an engine before another one is made"
            )
        return before
    if any(cut_of(param) is not None for param in model.parameters()):
        return None
    plan = tensor_plan(model, settings.tensor_parallel, ranks.index(rank), len(ranks), apart)
    if settings.tensor_parallel.reduce == "tree":
        check_blocks(model, plan, settings.tensor_parallel)
    return plan
