"""Layers that a plan cuts: which of their parameters are cut along which dim, and by how many groups of features."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero.core.comm import Axis
from zero.plan.tensors import STYLES, WHOLE, Share, Style, common_groups, fitting, ranges_of, share_of

_WIDTH = ("head_dim", "attention_head_size")  # of a head, as an attention calls it
_COUNT = ("num_heads", "num_attention_heads", "n_heads", "n_head")  # of heads
_KEYS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads")  # of heads of keys
COUNTS = (*_COUNT, *_KEYS)
_LATENT = "qk_head_dim"  # of an attention (MLA) whose heads are of several widths


class Slot(NamedTuple):
    """A parameter of a module: `dim` is cut; None for one that is whole, and if `sums` its gradient a part of a sum."""

    module: nn.Module
    name: str
    dim: int | None = None
    sums: bool = False

    @property
    def param(self) -> nn.Parameter:
        """The parameter itself."""
        return self.module._parameters[self.name]


@dataclass
class Layer:
    """A module, or a parameter of it, with what a plan says of it.

    name: in the model; param: of a parameter of `module` that the plan names; styled: the word of the plan; packs: the
    sizes of the tensors that are fused along the cut dim, empty for one. `share`, `rank` and `ranks` are set once the
    block is known; widths: attributes of modules that say how wide it is, and what they say of this rank.
    """

    name: str
    module: nn.Module
    styled: str
    param: str = ""
    packs: tuple[int, ...] = ()
    style: Style = STYLES["replicate"]
    share: Share = WHOLE
    rank: int = 0
    ranks: int = 1
    rope: int = 0
    widths: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.style = STYLES[self.styled]
        self.slots = list(_slots(self))
        if self.style.dim in ("out", "in", "rows") and not self.packs:
            numel, packs = self.main.param.shape[self.main.dim], self.style.packs
            if self.param == "gate_up_proj" and packs == 1 and getattr(self.module, "is_concatenated", False):
                packs = 2  # so experts of transformers say it themselves; plans of some forget it
            self.packs = (numel // packs,) * packs
            if numel % packs:
                raise ValueError(f"'{self.name}': its {numel} features are not {packs} equal tensors")

    @property
    def main(self) -> Slot:
        """Its weight, or the parameter it is."""
        return next(slot for slot in self.slots if slot.dim is not None)

    @property
    def divided(self) -> bool:
        """Whether it has a dim that is cut."""
        return self.style.dim in ("out", "in", "rows")

    @property
    def numel(self) -> int:
        """Elements along the cut dim, of all ranks."""
        return sum(self.packs)

    @functools.cached_property
    def part(self) -> tuple[int, int]:
        """Where this rank's part of the cut dim begins, of one tensor, and its elements of all that are fused."""
        return self.share.of(self.numel)[0], sum(self.share.of(pack)[1] for pack in self.packs)

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Elements along the cut dim that each rank has."""
        return [sum(size for _, size in each) for each in self.ranges]

    @functools.cached_property
    def ranges(self) -> tuple[list[tuple[int, int]], ...]:
        """Starts and sizes along the cut dim that each rank has."""
        shares = (share_of(self.share.groups, rank, self.ranks) for rank in range(self.ranks))
        return tuple(ranges_of(self.packs, share) for share in shares)

    @property
    def bias(self) -> Tensor | None:
        """The bias of a layer whose output is a sum over ranks: whole, and added behind it."""
        base = base_of(self.module)
        return base._parameters.get("bias") if self.style.dim == "in" and not self.param else None

    def shadows(self, axis: Axis) -> Iterator[tuple[nn.Module, str, Callable[[], Tensor | None]]]:
        """Modules, names of biases that are added once, and what stands there while the forward runs."""
        if (bias := self.bias) is not None:
            base = base_of(self.module)
            zeros = None if isinstance(base, nn.Linear) else bias.detach().new_zeros(()).expand_as(bias)
            yield base, "bias", lambda: zeros
        for slot in self.slots if self.style.takes == "routed" else ():
            yield slot.module, slot.name, lambda slot=slot: _FirstRanks.apply(slot.param, axis.rank == 0)


class _FirstRanks(torch.autograd.Function):
    """A whole bias that is added in each rank's part of a sum: the first rank's; its gradient is whole on each."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, here: bool) -> Tensor:
        return bias.view_as(bias) if here else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None


def base_of(module: nn.Module) -> nn.Module:
    """The layer inside of one with adapters of PEFT, or itself."""
    return getattr(module, "base_layer", module)


def _slots(layer: Layer) -> Iterator[Slot]:
    module, dim = layer.module, layer.style.dim
    if layer.param:
        ndim = module._parameters[layer.param].ndim
        yield Slot(module, layer.param, {"out": max(ndim - 2, 0), "in": ndim - 1}.get(dim), dim == "sums")
        return
    if dim == "sums":
        yield from (
            Slot(module, name, sums=True) for name in module._parameters if module._parameters[name] is not None
        )
        return
    if layer.style.takes == "routed":  # parameters that the plan cuts it names itself
        yield from (Slot(module, name) for name in module._parameters if "bias" in name)
        return
    if not dim:
        return
    base = base_of(module)
    dims = _dims(layer, base)
    yield Slot(base, "weight", dims[dim])
    if base._parameters.get("bias") is not None:
        yield Slot(base, "bias", 0 if dim == "out" else None)
    if base is not module:
        yield from _adapters(layer, dim)
    elif dim == "rows":  # an embedding with a norm of its own, which sees the tokens of each rank
        inside = (each for each in module.modules() if each is not module)
        yield from (Slot(each, name, sums=True) for each in inside for name in each._parameters)


def _dims(layer: Layer, base: nn.Module) -> dict[str, int]:
    """The dims of a weight by what they are."""
    weight = base._parameters.get("weight")
    if isinstance(base, nn.Embedding) and layer.style.dim in ("rows", "out"):
        if base.max_norm is not None or base.sparse:
            raise ValueError(
                f"'{layer.name}': an embedding with max_norm or sparse gradients is not cut; leave these out"
            )
        return {"rows": 0, "out": 1}
    if weight is None or weight.ndim != 2 or layer.style.dim == "rows":
        raise ValueError(
            f"'{layer.name}', a {type(base).__name__}, is not cut as '{layer.styled}': wanted a layer with a weight of "
            "two dims"
        )
    if not weight.is_floating_point():
        raise ValueError(
            f"'{layer.name}': its weight is of {weight.dtype}, quantised: it is not cut over ranks; load it in 16 bits"
        )
    swapped = type(base).__name__ == "Conv1D"  # transformers' has [in, out]
    return {"out": 1, "in": 0} if swapped else {"out": 0, "in": 1}


def _adapters(layer: Layer, dim: str) -> Iterator[Slot]:
    """Parameters of LoRA, whose inner dim is whole: of a layer cut along its outputs A sees all and B gives a part."""
    module = layer.module
    for name, child in module.named_children():
        params = [
            (each, key) for each in child.modules() for key, value in each._parameters.items() if value is not None
        ]
        if name == "base_layer" or not params:
            continue
        if name not in ("lora_A", "lora_B") or any(each._parameters[key].ndim > 2 for each, key in params):
            raise ValueError(f"'{layer.name}': its adapter has '{name}', which is not cut over ranks; use plain LoRA")
        for each, key in params:
            if (name, dim) in (("lora_A", "out"), ("lora_B", "in")):
                yield Slot(each, key, sums=True)
            else:
                yield Slot(each, key, 0 if dim == "out" else 1)


def set_shares(block: Sequence[Layer], scopes: Sequence[nn.Module], config: Any, rank: int, ranks: int) -> None:
    """Divide the features of layers that belong together; ValueError where that is not possible.

    scopes: the modules that have the layers; config: that of the model, which may know the number of heads.
    """
    counts = _heads(block, scopes, config)
    if counts is None:
        if len({pack for each in block for pack in each.packs}) > 1:
            said = ", ".join(f"'{each.name}' {'+'.join(map(str, each.packs))}" for each in block)
            raise ValueError(
                f"layers that are cut alike have other numbers of features: {said}. Where several tensors are fused in "
                "one, say so by a shape in tensor_parallel.partition_config, as in [2, -1]"
            )
        counts = {layer.name: block[0].packs[0] for layer in block}
    groups = common_groups(list(counts.values()))
    for layer in block:
        count = counts[layer.name]
        whole = groups >= ranks or (count > groups and count % ranks == 0)
        if not whole and not (
            count == groups and ranks % groups == 0 and len(counts) > 1 and max(counts.values()) > groups
        ):
            names = ", ".join(f"'{each.name}' {counts[each.name]}" for each in block)
            raise ValueError(
                f"{ranks} ranks do not divide the features that belong together: {names}; nearest that do: "
                f"{', '.join(map(str, fitting(groups)))}"
            )
        layer.rank, layer.ranks = rank, ranks
        layer.share = share_of(groups if groups >= ranks or count == groups else count, rank, ranks)
        if layer.share.repeats > 1 and len(layer.packs) > 1:
            raise ValueError(
                f"'{layer.name}' has queries, keys and values in one weight, and fewer heads of keys ({groups}) than "
                f"ranks ({ranks}); nearest that do: {', '.join(map(str, fitting(groups)))}"
            )


def _of(config: Any, name: str) -> Any:
    """A value of a configuration, or None; where layers differ in it, one of transformers raises a RuntimeError."""
    with contextlib.suppress(RuntimeError):
        return getattr(config, name, None)
    return None


def _heads(block: Sequence[Layer], scopes: Sequence[nn.Module], config: Any) -> dict[str, int] | None:
    """The number of heads of each layer of an attention; None where the block is none."""

    def said(names: Sequence[str]) -> int | None:
        found = (getattr(each, name, None) for each in scopes for name in names)
        return next((value for value in found if isinstance(value, int) and value > 0), None)

    width, count, latent = said(_WIDTH), said(_COUNT), said((_LATENT,))
    if not (width or count or latent or any("Attention" in type(each).__name__ for each in scopes)):
        return None
    count = count or _of(config, "num_attention_heads")
    keys = said(_KEYS) or _of(config, "num_key_value_heads")
    keys = keys if isinstance(keys, int) else None
    widths = [each for each in (width, said(("v_head_dim",))) if each]
    counts = {}
    for layer in block:
        pack = layer.packs[0] if len(set(layer.packs)) == 1 else common_groups(layer.packs)
        fitting_keys = keys and pack in (keys * width for width in widths)
        own = layer.name.rpartition(".")[2].startswith(("k", "v"))
        if pack == count and (layer.param or (keys and not fitting_keys)):
            counts[layer.name] = pack  # one number for each head, of sinks and gates
        elif fitting_keys and not latent and (own or pack not in ((count or 0) * width for width in widths)):
            counts[layer.name] = keys
        elif count and not latent and pack in (count * width for width in widths):
            counts[layer.name] = count
        elif width and not latent and all(each % width == 0 for each in layer.packs):
            counts[layer.name] = pack // width
        elif count and pack % count == 0:
            counts[layer.name] = count
        else:
            raise ValueError(
                f"'{layer.name}' has {pack} features, and its attention says no number of heads that divides them; say "
                "how it is cut by tensor_parallel.partition_config"
            )
    return counts


def set_widths(layer: Layer, changed: list[tuple[nn.Module, str, Any]]) -> None:
    """Have the attributes of a layer that say its width say that of this rank; notes what they were."""
    base, (start, size) = base_of(layer.module), layer.part
    names = {
        "out": ("embedding_dim",) if isinstance(base, nn.Embedding) else ("out_features", "nf"),
        "in": ("in_features", "nx"),
        "rows": ("num_embeddings",),
    }
    for name in names.get(layer.style.dim, ()) if not layer.param else ():
        for module in {base, layer.module}:
            if isinstance(module.__dict__.get(name), int):
                changed.append((module, name, module.__dict__[name]))
                module.__dict__[name] = size
                layer.widths.append((module, name, size))
    if layer.style.dim == "rows" and base.padding_idx is not None:
        changed.append((base, "padding_idx", base.padding_idx))
        at = base.padding_idx - start
        base.padding_idx = at if 0 <= at < size else None
