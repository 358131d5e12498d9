"""Layers that are cut, with the same bits however many ranks they are cut over: `"reduce": "tree"`.

A product over a slice of features need not have the bits of that slice of the product over all, so all products of a
layer have shapes that no number of ranks changes: its features are a fixed number of blocks, of which each rank has
equally many. Sums over blocks are fp32 (fp64 of fp64) in a fixed binary tree: first over those of a rank, which are a
whole subtree, then over ranks, which send each other theirs; they are rounded once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero.core.tree import Tree
from zero.core.world import Axis
from zero.parallel.tensor import moves
from zero.parallel.tensor.forward import CutForward, Regions
from zero.parallel.tensor.layers import Layer, base_of
from zero.parallel.tensor.plan import TensorPlan, pretrained

_SERVED = ("colwise", "packed_colwise", "rowwise", "colwise_gather_output", "colwise_rep", "rowwise_split_input")
_SERVED += ("rowwise_rep", "embedding_rowwise", "embedding_colwise", "local_params", "replicate")
_WIDE = (torch.float32, torch.float64)
_DRAWN = (
    "tensor_parallel.reduce 'tree': random numbers were drawn where each rank has a part of the features; set dropout of "
    "attention, and between layers that are cut, to 0"
)


class _Blocks(NamedTuple):
    """A rank's blocks of a layer: starts and sizes in its features, of each tensor that is fused in them."""

    ranges: tuple[tuple[tuple[int, int], ...], ...]
    dim: int  # of the weight, that is cut
    swapped: bool  # the weight is [in, out]
    axis: Axis

    def of(self, x: Tensor, dim: int) -> list[Tensor]:
        """The blocks of a tensor that is cut along `dim`, each in one piece of aligned memory."""
        return [_aligned(_cat([x.narrow(dim, *span) for span in spans], dim)) for spans in self.ranges]

    def weights(self, weight: Tensor) -> list[Tensor]:
        """The blocks of the weight, as [out, in]."""
        return [each.t() if self.swapped else each for each in self.of(weight, self.dim)]

    def joined(self, blocks: list[Tensor], dim: int) -> Tensor:
        """The inverse of `of`."""
        pieces = [block.split([size for _, size in self.ranges[0]], dim) for block in blocks]
        return _cat([piece for fused in zip(*pieces, strict=True) for piece in fused], dim)

    def gradient(self, outs: list[Tensor], ins: list[Tensor]) -> Tensor:
        """The gradient of the weight, from that of what each block gives, and what it takes."""
        pairs = zip(outs, ins, strict=True)
        return self.joined([x.t() @ grad if self.swapped else grad.t() @ x for grad, x in pairs], self.dim)

    def summed(self, lefts: list[Tensor], rights: list[Tensor]) -> Tensor:
        """The sum of products over the blocks of all ranks, in the dtype of what is multiplied."""
        tree: Tree[Tensor] = Tree(Tensor.add_)
        for at, (left, right) in enumerate(zip(lefts, rights, strict=True)):
            tree.put(at, _product(left, right))
        total = tree.take()
        if self.axis.size > 1:
            for rank, row in enumerate(moves.all_gather(total[None], self.axis, 0, [1] * self.axis.size)):
                tree.put(rank, row)
            total = tree.take()
        return total.to(lefts[0].dtype)


class _Columns(torch.autograd.Function):
    """What a layer that is cut along its outputs gives on this rank, from what is whole; the gradient of that is, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, blocks: _Blocks) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.blocks = blocks
        with torch.autocast(x.device.type, enabled=False):
            x, weights = _aligned(x), blocks.weights(weight)
            if bias is None:
                return blocks.joined([x @ each.t() for each in weights], 1)
            pairs = zip(blocks.of(bias, 0), weights, strict=True)
            return blocks.joined([torch.addmm(own, x, each.t()) for own, each in pairs], 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x, weight), blocks = ctx.saved_tensors, ctx.blocks
        of_x = of_weight = of_bias = None
        with torch.autocast(x.device.type, enabled=False):
            grads = blocks.of(grad, 1)
            if ctx.needs_input_grad[1]:
                of_weight = blocks.gradient(grads, [_aligned(x)] * len(grads))
            if ctx.needs_input_grad[2]:
                of_bias = blocks.joined([each.sum(0) for each in grads], 0)
            if ctx.needs_input_grad[0]:
                of_x = blocks.summed(grads, blocks.weights(weight))
        return of_x, of_weight, of_bias, None


class _Rows(torch.autograd.Function):
    """What a layer that is cut along its inputs gives, which is whole, without its bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, blocks: _Blocks) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.blocks = blocks
        with torch.autocast(x.device.type, enabled=False):
            return blocks.summed(blocks.of(x, 1), [each.t() for each in blocks.weights(weight)])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x, weight), blocks = ctx.saved_tensors, ctx.blocks
        of_x = of_weight = None
        with torch.autocast(x.device.type, enabled=False):
            grad = _aligned(grad)
            if ctx.needs_input_grad[0]:
                of_x = blocks.joined([grad @ each for each in blocks.weights(weight)], 1)
            if ctx.needs_input_grad[1]:
                of_weight = blocks.gradient([grad] * len(blocks.ranges), blocks.of(x, 1))
        return of_x, of_weight, None


class TreeForward(CutForward):
    """The forward of a layer that is cut, in `blocks` blocks of all ranks."""

    def __init__(self, layer: Layer, axis: Axis, scope: Any, blocks: int) -> None:
        super().__init__(layer, axis, scope, None)
        self._blocks = blocks

    def run(self, x: Any, args: Any, kwargs: dict[str, Any], name: str = "") -> Any:
        """See `Replaced.run`."""
        layer, style = self._layer, self._layer.style
        if isinstance(layer.module, nn.Embedding) or not layer.divided:
            out = super().run(x, args, kwargs, name)
            return out + 0.0 if style.takes == "ids" else out  # as a sum over ranks, which has no -0.0
        regions = self._scope.regions if self._scope is not None and self.module.training else None
        if regions is not None and style.dim == "in":
            regions.leave()
        if style.takes == "split":
            x = moves.split(x, self.axis, -1, layer.sizes)
        out = self._product(x)
        if regions is not None and style.dim == "out":
            regions.enter()
        return moves.gathered(out, self.axis, -1, layer.sizes) if style.gives == "gather" else out

    def _product(self, x: Tensor) -> Tensor:
        layer, weight, bias = self._layer, self.module.weight, self.module.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = (each if each is None else each.to(dtype) for each in (x, weight, bias))
        count, spans, start = self._blocks // self.axis.size, [], 0
        for size in (layer.share.of(pack)[1] for pack in layer.packs):
            spans.append([(start + at * (size // count), size // count) for at in range(count)])
            start += size
        swapped = type(self.module).__name__ == "Conv1D"
        blocks = _Blocks(tuple(zip(*spans, strict=True)), layer.main.dim, swapped, self.axis)
        flat = x.reshape(-1, x.shape[-1])
        if layer.style.dim == "out":
            out = _Columns.apply(flat, weight, bias, blocks)
        else:
            out = _Rows.apply(flat, weight, blocks)
            out = out if bias is None else out + bias
        return out.reshape(*x.shape[:-1], out.shape[-1])


class NoDraws(Regions):
    """Where each rank has a part of the activations, nothing is drawn: it would depend on how many ranks there are."""

    def enter(self) -> None:
        """From here on, nothing is."""
        if self._after is None:
            self._after = self._generator.get_state()

    def leave(self) -> None:
        """Raises ValueError if something was."""
        before, self._after = self._after, None
        if before is not None and not torch.equal(before, self._generator.get_state()):
            raise ValueError(_DRAWN)


def check_blocks(model: nn.Module, plan: TensorPlan, section: Any) -> None:
    """Raise ValueError, naming the layer, where a plan cannot be done in blocks."""
    where, blocks, ranks = "tensor_parallel.reduce 'tree'", section.blocks, plan.ranks
    if blocks < 1 or blocks & (blocks - 1) or blocks % ranks:
        raise ValueError(
            f"tensor_parallel.blocks: got {blocks}; 'tree' wants a power of two, that {ranks} ranks divide"
        )
    if section.sequence_parallel:
        raise ValueError(
            f"{where}: gradients of norms between layers would be sums over ranks; set sequence_parallel to false"
        )
    theirs = pretrained(model)
    if theirs is not None and getattr(theirs[1].config, "_attn_implementation", None) == "eager":
        raise ValueError(
            f"{where}: the products of eager attention depend on how many heads a rank has; load the model with "
            "attn_implementation='sdpa'"
        )
    for layer in plan.layers:
        if layer.styled not in _SERVED or layer.param or base_of(layer.module) is not layer.module:
            what = f"a {type(layer.module).__name__} that the plan says is '{layer.styled}'"
            fits = "set reduce to 'sum', or leave it out of the plan"
            raise ValueError(
                f"{where}: '{layer.name}' is {what}{'' if layer.styled in _SERVED else ', or its adapter'}; {fits}"
            )
        if not layer.divided or isinstance(layer.module, nn.Embedding):
            continue
        if layer.share.repeats > 1 or layer.share.groups % ranks:
            raise ValueError(f"{where}: {ranks} ranks do not divide the {layer.share.groups} groups of '{layer.name}'")
        if odd := [pack for pack in layer.packs if pack % blocks]:
            near = f"{odd[0] // blocks * blocks} or {-(-odd[0] // blocks) * blocks}"
            raise ValueError(
                f"{where}: {blocks} blocks do not divide the {odd[0]} features of '{layer.name}'; nearest that they do: "
                f"{near}; or set tensor_parallel.blocks to {odd[0] & -odd[0]}"
            )


def _product(left: Tensor, right: Tensor) -> Tensor:
    """In fp32 of 16 bits, without a rounding before."""
    if left.dtype in _WIDE:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _cat(tensors: list[Tensor], dim: int) -> Tensor:
    return torch.cat(tensors, dim) if len(tensors) > 1 else tensors[0]


def _aligned(x: Tensor) -> Tensor:
    """`x` in one piece, at an address from which no library chooses another way to multiply."""
    if x.is_contiguous() and x.data_ptr() % (256 if x.is_cuda else 64) == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
