"""The plan of which part of each layer a rank has, from the styles of layers; nothing is changed yet."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from zero.parallel.division import Place
from zero.parallel.pipeline.partition import layers as blocks_of
from zero.parallel.tensor.forward import has_dropout
from zero.parallel.tensor.layers import COUNTS, Layer, Slot, base_of, set_shares
from zero.parallel.tensor.styles import OF_MODEL, Styles, linears_of, pretrained, styles_of
from zero.plan.grid import DENSE, PARTS
from zero.plan.patterns import is_inside
from zero.plan.tensors import STYLES, ranges_of, share_of, slice_of

# Modules that do to each token the same as to one alone; all others between cut ones are given whole sequences.
_ALONE = (nn.Identity, nn.Dropout, nn.ReLU, nn.GELU, nn.SiLU)
_NORM = re.compile("(?<!Batch)(?<!Group)(?<!Instance)Norm")


@dataclass
class Block:
    """Layers whose features are divided alike. `scope`: the name of the module that has them all."""

    scope: str
    layers: list[Layer]


@dataclass
class TensorPlan:
    """The plan that cuts a model over `ranks`, of which this is number `rank`.

    alone: layers that no other has to be cut like; counted: attributes that count what is cut, by modules; blocks of
    the trunk and what is cut inside of each, `sections`, where sequences are cut, too.
    """

    source: str
    rank: int
    ranks: int
    blocks: list[Block]
    alone: list[Layer]
    places: dict[str, Place]
    counted: list[tuple[nn.Module, str, Block]]
    trunk: list[str] = field(default_factory=list)
    sections: list[str] = field(default_factory=list)

    @property
    def layers(self) -> Iterator[Layer]:
        """All that are cut, or whose inputs or outputs are moved."""
        for block in self.blocks:
            yield from block.layers
        yield from self.alone


def tensor_plan(model: nn.Module, section: Any, rank: int, ranks: int, apart: Sequence[str] = ()) -> TensorPlan:
    """The plan by which the section `tensor_parallel` cuts a model; changes nothing. apart: modules that stay whole.

    Raises ValueError where nothing tells how, with what there is, and where ranks do not divide what belongs together.
    """
    where = f"tensor_parallel.autotp_size {ranks}"
    if any(type(param).__name__ == "DTensor" or hasattr(param, "device_mesh") for param in model.parameters()):
        raise ValueError(
            f"{where}: the model has DTensors, cut by another library; build it without (no tp_plan=, no "
            "distributed_config=), and tensor_parallel cuts it"
        )
    try:
        styles = styles_of(model, section)
        for name in [name for name in styles.by_name if any(is_inside(name, each) for each in apart)]:
            del styles.by_name[name]
        layers = [_layer(model, name, style, styles) for name, style in styles.by_name.items()]
        layers = [layer for each in layers for layer in each]
        plan = _divided(model, layers, styles, rank, ranks)
        if section.sequence_parallel:
            _cut_sequences(model, plan)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if not any(layer.divided for layer in plan.layers) and section.partition_config.use_default_specs:
        raise ValueError(f"{where}: nothing tells how {type(model).__name__} is cut{_found(model)}")
    return plan


def _layer(model: nn.Module, name: str, style: str, styles: Styles) -> list[Layer]:
    owner, _, own = name.rpartition(".")
    parent = model.get_submodule(owner)
    if parent._parameters.get(own) is not None:
        return [Layer(name, parent, style, own, styles.packs.get(name, ()))] if STYLES[style].dim else []
    module = model.get_submodule(name)
    saved = getattr(module, "modules_to_save", None)  # copies that PEFT trains in place of the module
    copies = [getattr(module, "original_module", None), *(saved.values() if isinstance(saved, nn.ModuleDict) else ())]
    copies = [each for each in copies if each is not None] or [module]
    return [Layer(name, each, style, packs=styles.packs.get(name, ())) for each in copies]


def _divided(model: nn.Module, layers: list[Layer], styles: Styles, rank: int, ranks: int) -> TensorPlan:
    inner = [layer for layer in layers if layer.divided and not layer.style.alone]
    blocks, named = _blocks(inner), dict(model.named_modules())
    theirs = pretrained(model)
    config = None if theirs is None else theirs[1].config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    counting: list[tuple[nn.Module, str, Block]] = []
    for block in blocks:
        scopes = [each for name, each in named.items() if name == block.scope or _has(block, name)]
        set_shares(block.layers, scopes, config, rank, ranks)
        if not styles.source.startswith(OF_MODEL):  # such a plan is for code that counts heads by their width
            counting += [(each, name, block) for each in scopes for name in COUNTS if name in vars(each)]
    alone = [layer for layer in layers if not layer.divided or layer.style.alone]
    for layer in alone:
        if layer.divided:
            set_shares([layer], (), None, rank, ranks)
        if layer.style.gives == "rope":
            layer.rope = config.qk_rope_head_dim
    counted = [
        (named[name], attribute, next(block for block in blocks if is_inside(name, block.scope)))
        for name, attributes in styles.locals.items()
        for attribute in attributes
    ]
    known = {(module, attribute) for module, attribute, _ in counted}
    counted += [each for each in counting if each[:2] not in known]
    for block in blocks:
        if any(layer.share.repeats > 1 for layer in block.layers):
            counted.append((named[block.scope], "num_key_value_groups", block))
    alone += _norms_of_heads(blocks, named, styles)
    plan = TensorPlan(styles.source, rank, ranks, blocks, alone, {}, counted)
    names = {id(param): name for name, param in model.named_parameters()}
    for layer in plan.layers:
        for slot in layer.slots:
            _place(plan, names[id(slot.param)], layer, slot)
    return plan


def _norms_of_heads(blocks: list[Block], named: Mapping[str, nn.Module], styles: Styles) -> list[Layer]:
    """Norms of each head of an attention that no plan names: they see the heads of each rank."""
    found = []
    for block in blocks:
        scope = named[block.scope]
        width = 0 if hasattr(scope, "qk_head_dim") else getattr(scope, "head_dim", 0)
        for name, child in scope.named_children():
            path = f"{block.scope}.{name}" if block.scope else name
            params = list(child._parameters.values())
            if (
                "norm" in name
                and path not in styles.by_name
                and [each.shape for each in params if each is not None] == [(width,)]
            ):
                found.append(Layer(path, child, "replicated_with_grad_allreduce"))
    return found


def _has(block: Block, name: str) -> bool:
    """Whether a module of this name, inside of the block, has some of its layers."""
    return is_inside(name, block.scope) and any(is_inside(each.name, name) for each in block.layers)


def _blocks(layers: list[Layer]) -> list[Block]:
    """Layers by the innermost module that has both some cut along their outputs and some along their inputs."""
    by_parent: dict[str, list[Layer]] = {}
    for layer in layers:
        by_parent.setdefault(layer.name.rpartition(".")[0], []).append(layer)
    done, open_ = [], {}
    for parent, found in by_parent.items():
        kinds = {layer.style.dim for layer in found}
        if all(layer.param for layer in found):
            done.append(Block(parent, found))
        elif kinds == {"out", "in"}:
            done += [Block(parent, part) for part in _in_order(found)]
        else:
            open_[parent] = found
    for parent in sorted(open_, key=lambda name: -name.count(".")):
        if parent not in open_ or {layer.style.dim for layer in open_[parent]} != {"in"}:
            continue
        scope, rows = parent, open_.pop(parent)
        while scope:
            scope = scope.rpartition(".")[0]
            inside = [name for name in open_ if name.startswith(f"{scope}.") or not scope]
            columns = [name for name in inside if {layer.style.dim for layer in open_[name]} != {"in"}]
            if columns:
                done.append(Block(scope, [*(layer for name in columns for layer in open_.pop(name)), *rows]))
                break
        else:
            raise ValueError(f"'{rows[0].name}' is cut along its inputs, and no layer before it along its outputs")
    for parent, found in open_.items():
        within = [block for block in done if block.scope.startswith(f"{parent}.")]
        if len(within) != 1:
            raise ValueError(f"'{found[0].name}' is cut along its outputs, and no layer behind it along its inputs")
        within[0].scope, within[0].layers = parent, [*found, *within[0].layers]
    return done


def _in_order(found: list[Layer]) -> list[list[Layer]]:
    """The blocks of one module that has several: each ends with a layer that is cut along its inputs."""
    parts: list[list[Layer]] = [[]]
    for at, layer in enumerate(found):
        parts[-1].append(layer)
        if layer.style.dim == "in" and {each.style.dim for each in found[at + 1 :]} == {"out", "in"}:
            parts.append([])
    return parts


def _place(plan: TensorPlan, name: str, layer: Layer, slot: Slot) -> None:
    if slot.dim is None:
        if slot.sums:
            plan.places[name] = Place(slot.param, None, DENSE._replace(sums=("tp",)), said=layer.style.dim == "sums")
        return
    shape = tuple(slot.param.shape)
    packs = layer.packs if sum(layer.packs) == shape[slot.dim] else (shape[slot.dim],)
    share, axes = layer.share, PARTS
    if share.repeats > 1:
        axes = DENSE._replace(parts=(f"tp/{share.repeats}",), sums=(f"tp%{share.repeats}",))
    ranges = tuple(ranges_of(packs, share_of(share.groups, rank, plan.ranks)) for rank in range(plan.ranks))
    found = Place(slot.param, slice_of(shape, slot.dim, ranges[plan.rank]), axes, slot.dim, ranges)
    if plan.places.setdefault(name, found)[1:] != found[1:]:
        raise ValueError(f"'{name}' belongs to several layers, which the plan cuts differently")


def _cut_sequences(model: nn.Module, plan: TensorPlan) -> None:
    """Have sequences be cut between the blocks of the trunk, whose own parameters then see a part of the tokens."""
    trunk = [name for name in blocks_of(model) if any(block.scope.startswith(f"{name}.") for block in plan.blocks)]
    if not trunk or len(trunk) < len(blocks_of(model)):
        raise ValueError(
            f"sequence_parallel: {type(model).__name__} has no list of blocks in which layers are cut, all of "
            "them; set it to false"
        )
    plan.trunk = trunk
    for block in trunk:
        module = model.get_submodule(block)
        if over := [each.scope for each in plan.blocks if each.scope == block]:
            parts = [layer.name for each in plan.blocks if each.scope in over for layer in each.layers]
            raise ValueError(
                f"sequence_parallel: {', '.join(parts)} are cut together, and no module inside of '{block}' has them "
                "all; set it to false"
            )
        whole = {name for name, child in module.named_children() if not _sees_tokens_alone(child)}
        layers = [name for name, _ in linears_of(module)]
        layers += [each.name[len(block) + 1 :] for each in plan.layers if each.divided and is_inside(each.name, block)]
        if direct := [name for name in layers if "." not in name]:
            raise ValueError(
                f"sequence_parallel: '{block}' calls its layer '{direct[0]}' itself, and may mix tokens between "
                "such calls; set it to false"
            )
        if has_dropout([module]):
            raise ValueError(
                f"sequence_parallel: '{block}' drops in its own forward, and would drop the same of all parts of a "
                "sequence; give it an nn.Dropout, or set it to false"
            )
        plan.sections += [f"{block}.{name}" for name in sorted(whole)]
        for name, param in module.named_parameters():
            if name.partition(".")[0] not in whole:
                plan.places[f"{block}.{name}"] = Place(param, None, DENSE._replace(sums=("tp",)))


def _sees_tokens_alone(module: nn.Module) -> bool:
    """Whether a module without layers does to each token the same as to one alone, as far as its kind says."""
    leaves = [each for each in module.modules() if not list(each.children())]
    return all(isinstance(each, _ALONE) or _NORM.search(type(each).__name__) for each in leaves)


def _found(model: nn.Module) -> str:
    """The layers of a model whose names say nothing, for an error."""
    linears: dict[str, str] = {}
    for name, module in linears_of(model):
        weight = base_of(module).weight
        generic = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) or type(module).__name__
        linears.setdefault(generic, "x".join(map(str, weight.shape)))
    own = [name for name, each in model.named_modules() if isinstance(each, nn.MultiheadAttention)]
    text = f"; its layers are {', '.join(f'{name} {shape}' for name, shape in linears.items()) or 'none'}"
    if own:
        text += f", and {', '.join(own)}, whose forward reads its weights itself and which stay whole"
    return (
        f"{text}. Say it by tensor_parallel.partition_config, as in "
        '{"layer_specs": [{"patterns": [".*fc1.weight$"], "partition_type": "column"}, '
        '{"patterns": [".*fc2.weight$"], "partition_type": "row"}]}, or give the model a tp_plan'
    )
