"""Layers that are cut, with the same bits however many ranks they are cut over: `"reduce": "tree"`.

A product over a slice of features need not have the bits of that slice of the product over all, so all products of a
layer have shapes that no number of ranks changes: its features are a fixed number of blocks, of which each rank has
equally many. Sums over blocks are fp32 (fp64 of fp64) in a fixed binary tree: first over those of a rank, which are a
whole subtree, then over ranks, which send each other theirs; they are rounded once.

What is computed between layers is left to torch. On CPUs it does not depend on the number of heads in
`scaled_dot_product_attention`, as it does in eager attention; SiLU and others compute what remains of a vector by other
code, so the features of each rank must be a multiple of 64. Other devices have not been tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from zero.core.comm import Axis
from zero.core.tree import Tree
from zero.parallel import moves
from zero.parallel.tensor.forward import CutForward, Regions
from zero.parallel.tensor.layers import Layer, base_of
from zero.parallel.tensor.plan import TensorPlan, pretrained

_SERVED = {"colwise", "packed_colwise", "rowwise", "colwise_gather_output", "colwise_rep", "rowwise_split_input"}
_SERVED |= {"rowwise_rep", "embedding_rowwise", "embedding_colwise", "local_params", "replicate"}
_WIDE = (torch.float32, torch.float64)


class _Blocks(NamedTuple):
    """A rank's blocks of a layer: starts and sizes in its features, of each tensor that is fused in them."""

    ranges: tuple[tuple[tuple[int, int], ...], ...]
    rows: bool  # its inputs are cut, else its outputs
    swapped: bool  # the weight is [in, out]
    axis: Axis

    def of(self, x: Tensor, dim: int, cut: bool = True) -> list[Tensor]:
        """The part of each block along `dim`, or all of `x`, in one piece."""
        spans = self.ranges if cut else [((0, x.shape[dim]),)]
        found = [_aligned(_cat([x.narrow(dim, *span) for span in each], dim)) for each in spans]
        return found if cut else found * len(self.ranges)

    def weights(self, weight: Tensor) -> list[Tensor]:
        """The blocks of the weight, as [in, out]."""
        found = self.of(weight, int(self.rows != self.swapped))
        return found if self.swapped else [each.t() for each in found]

    def joined(self, blocks: list[Tensor], dim: int) -> Tensor:
        """The inverse of `of`."""
        pieces = [block.split([size for _, size in self.ranges[0]], dim) for block in blocks]
        return _cat([piece for fused in zip(*pieces, strict=True) for piece in fused], dim)

    def summed(self, lefts: list[Tensor], rights: list[Tensor]) -> Tensor:
        """The sum of products over the blocks of all ranks, in the dtype of what is multiplied."""
        total = _added(map(_times, lefts, rights))
        if self.axis.size > 1:
            total = _added(moves.all_gather(total[None], self.axis, 0, [1] * self.axis.size))
        return total.to(lefts[0].dtype)


class _Product(torch.autograd.Function):
    """x [n, in] times the weight, plus a bias that is cut: of whole and cut tensors, as the blocks say."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, blocks: _Blocks) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.blocks = blocks
        with torch.autocast(_kind(x), enabled=False):
            both = blocks.of(x, 1, blocks.rows), blocks.weights(weight)
            if blocks.rows:
                return blocks.summed(*both)
            if bias is None:
                return blocks.joined([own @ each for own, each in zip(*both, strict=True)], 1)
            return blocks.joined(list(map(torch.addmm, blocks.of(bias, 0), *both)), 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x, weight), blocks = ctx.saved_tensors, ctx.blocks
        of_x = of_weight = of_bias = None
        with torch.autocast(_kind(x), enabled=False):
            grads = blocks.of(grad, 1, not blocks.rows)
            if ctx.needs_input_grad[0]:
                weights = [each.t() for each in blocks.weights(weight)]
                parts = zip(grads, weights, strict=True)
                of_x = blocks.joined([a @ b for a, b in parts], 1) if blocks.rows else blocks.summed(grads, weights)
            if ctx.needs_input_grad[1]:
                pairs = zip(grads, blocks.of(x, 1, blocks.rows), strict=True)
                found = [own.t() @ out if blocks.swapped else out.t() @ own for out, own in pairs]
                of_weight = blocks.joined(found, int(blocks.rows != blocks.swapped))
            if ctx.needs_input_grad[2]:
                of_bias = blocks.joined([each.sum(0) for each in grads], 0)
        return of_x, of_weight, of_bias, None


class TreeForward(CutForward):
    """The forward of a layer that is cut, in `blocks` blocks of all ranks."""

    def __init__(self, layer: Layer, axis: Axis, scope: Any, blocks: int) -> None:
        super().__init__(layer, axis, scope, None)
        self._blocks = blocks

    def cut(self, x: Any, args: Any, kwargs: dict[str, Any], name: str) -> Any:
        """See `CutForward.cut`."""
        layer, style = self._layer, self._layer.style
        if isinstance(layer.module, nn.Embedding):
            out = super().cut(x, args, kwargs, name)
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
        layer, module = self._layer, cast(Any, self.module)
        weight, bias = module.weight, module.bias
        if torch.is_autocast_enabled(_kind(x)):
            dtype = torch.get_autocast_dtype(_kind(x))
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        count, spans, start = self._blocks // self.axis.size, [], 0
        for size in (layer.share.of(pack)[1] for pack in layer.packs):
            spans.append([(start + at * (size // count), size // count) for at in range(count)])
            start += size
        rows, swapped = layer.style.dim == "in", type(self.module).__name__ == "Conv1D"
        blocks = _Blocks(tuple(zip(*spans, strict=True)), rows, swapped, self.axis)
        out = _Product.apply(x.reshape(-1, x.shape[-1]), weight, None if rows else bias, blocks)
        out = out + bias if rows and bias is not None else out  # once, behind the sum
        return out.reshape(*x.shape[:-1], out.shape[-1])


class NoDraws(Regions):
    """Where each rank has a part of the activations, nothing is drawn: it would depend on how many ranks there are."""

    def enter(self) -> None:
        """From here on, nothing may be drawn."""
        if self._after is None:
            self._after = self._generator.get_state()

    def leave(self) -> None:
        """Raises ValueError if something was."""
        before, self._after = self._after, None
        if before is not None and not torch.equal(before, self._generator.get_state()):
            raise ValueError(
                "tensor_parallel.reduce 'tree': random numbers were drawn where each rank has a part of the features; "
                "set the dropout there, of attention say, to 0"
            )


def check_blocks(model: nn.Module, plan: TensorPlan, section: Any) -> None:
    """Raise ValueError, naming the layer, where a plan cannot be done in blocks."""
    if (wrong := next(_wrong(model, plan, section), None)) is not None:
        raise ValueError(f"tensor_parallel.reduce 'tree': {wrong}")


def _wrong(model: nn.Module, plan: TensorPlan, section: Any) -> Iterator[str]:
    blocks, ranks, theirs = section.blocks, plan.ranks, pretrained(model)
    if blocks % ranks:
        yield f"{ranks} ranks do not divide tensor_parallel.blocks, which is {blocks}"
    if section.sequence_parallel:
        yield "gradients of the norms between layers would be sums over ranks; set sequence_parallel to false"
    if theirs is not None and getattr(theirs[1].config, "_attn_implementation", None) == "eager":
        yield "eager attention gives other bits for other numbers of heads; load with attn_implementation='sdpa'"
    for layer in plan.layers:
        share = layer.share
        if layer.styled not in _SERVED or layer.param:
            yield f"'{layer.name}' is '{layer.styled}' in the plan, which is not done in blocks; set reduce to 'sum'"
        elif base_of(layer.module) is not layer.module:
            yield f"'{layer.name}' has an adapter, which is not done in blocks; set reduce to 'sum'"
        elif not layer.divided or isinstance(layer.module, nn.Embedding):
            continue
        elif share.repeats > 1 or share.groups % ranks:
            yield f"{ranks} ranks do not divide the {share.groups} heads or features of '{layer.name}' that go together"
        elif odd := next((pack for pack in layer.packs if pack % blocks), 0):
            near = f"{odd // blocks * blocks} and {-(-odd // blocks) * blocks}"
            most = f", or blocks can be {odd & -odd}" if odd & -odd >= ranks else ""
            yield f"{blocks} blocks do not divide the {odd} features of '{layer.name}'; they do {near}{most}"


def _added(leaves: Iterable[Tensor]) -> Tensor:
    """The sum of a power of two of tensors, which are made one after the other."""
    tree: Tree[Tensor] = Tree(Tensor.add_)
    for at, leaf in enumerate(leaves):
        tree.put(at, leaf)
    (total,) = tree.values
    return total


def _kind(x: Tensor) -> str:
    return "cpu" if x.is_meta else x.device.type  # autocast knows no other


def _times(left: Tensor, right: Tensor) -> Tensor:
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
