"""A linear layer as a grid of smaller ones, for weights too large to be gathered whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from zero.core.access import GatheredParameters
from zero.core.leaf import set_apart
from zero.plan.tensors import sizes_of


class TiledLinear(nn.Module):
    """`nn.Linear(in_features, out_features)` in `out_splits` x `in_splits` tiles, each a module of its own.

    Under stage 3 every tile is gathered when it runs and released behind it, in forward and backward, also inside a
    transformer block, whose other parameters are gathered at once. So about one tile of the weight is whole at a time,
    and what `stage3_prefetch_bucket_size` allows to be fetched ahead; 0 there means none.

    in_splits, out_splits: into how many tiles input and output features are cut; sizes differ by one at most;
    input_is_already_split: `forward` takes a sequence of `in_splits` tensors [..., part], not one [..., in_features];
    combine_out_splits: `forward` returns one tensor [..., out_features]; else a list of `out_splits` parts;
    linear_cls:  what a tile is: called with (in_features, out_features, bias=..., **kwargs), has `weight`, `bias`;
    init_linear: a layer of the same sizes whose values are taken over (see `copy_params_from`).

    `linears[row][column]` is a tile; the last column has the bias. Tiles of `nn.Linear` start with the spread of a
    layer of `in_features`. With one column, output and gradients of the parameters are those of `nn.Linear` up to the
    order in which a matrix product adds; with more, outputs of columns are added, and so are gradients of the input
    over rows. Raises ValueError for sizes that cannot be cut so.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        _check_splits("in", in_features, in_splits)
        _check_splits("out", out_features, out_splits)
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bool(bias)
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts, self.out_parts = sizes_of(in_features, in_splits), sizes_of(out_features, out_splits)
        self.linears = nn.ModuleList()
        for height in self.out_parts:
            row = nn.ModuleList()
            for column, width in enumerate(self.in_parts):
                tile = linear_cls(width, height, bias=self.use_bias and column == in_splits - 1, **kwargs)
                if type(tile) is nn.Linear:
                    _widen_fan(tile, in_features)
                set_apart(tile)
                row.append(tile)
            self.linears.append(row)
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
        """Map [..., in_features] to [..., out_features], or what is split of the two (see the class)."""
        parts = self._parts(input_)
        outputs = []
        for row in self.linears:
            output = row[0](parts[0])
            for tile, part in zip(row[1:], parts[1:], strict=True):
                output = output + tile(part)
            outputs.append(output)
        if not self.combine_out_splits:
            return outputs
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Module) -> None:
        """Take over the weight [out_features, in_features] and the bias of another linear layer; a collective.

        Both may be released parameters; of this layer one tile is gathered at a time. Every rank has to call it, and
        rank 0's values count. Raises ValueError for another shape, and where only one of the two layers has a bias.
        """
        bias = getattr(other, "bias", None)
        wanted = (self.out_features, self.in_features)
        if tuple(other.weight.shape) != wanted:
            raise ValueError(f"copy_params_from: got a weight {tuple(other.weight.shape)}; wanted {wanted}")
        if (bias is not None) != self.use_bias:
            raise ValueError(
                f"copy_params_from: got a layer {'without' if bias is None else 'with'} a bias; this one has "
                f"{'one' if self.use_bias else 'none'}"
            )
        with GatheredParameters([each for each in (other.weight, bias) if each is not None]):
            for tile, rows, columns in self._tiles():
                with GatheredParameters(tile.parameters(), modifier_rank=0):
                    tile.weight.copy_(other.weight[rows, columns])
                    if tile.bias is not None:
                        tile.bias.copy_(bias[rows])

    def extra_repr(self) -> str:
        """What `print` shows between the brackets."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, "
            f"in_splits={self.in_splits}, out_splits={self.out_splits}"
        )

    def _parts(self, input_: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
        if not self.input_is_already_split:
            if not isinstance(input_, Tensor) or input_.shape[-1] != self.in_features:
                shapes = tuple(input_.shape) if isinstance(input_, Tensor) else type(input_).__name__
                raise ValueError(f"TiledLinear: got an input {shapes}; wanted a tensor [..., {self.in_features}]")
            return input_.split(self.in_parts, dim=-1)
        if isinstance(input_, Tensor) or [part.shape[-1] for part in input_] != self.in_parts:
            shapes = [tuple(part.shape) for part in ([input_] if isinstance(input_, Tensor) else input_)]
            raise ValueError(
                f"TiledLinear: got inputs {shapes}; wanted {self.in_splits} tensors with {self.in_parts} features"
            )
        return input_

    def _tiles(self) -> Iterator[tuple[nn.Module, slice, slice]]:
        """Every tile with its rows and columns of the whole weight."""
        for row, rows in zip(self.linears, _spans(self.out_parts), strict=True):
            for tile, columns in zip(row, _spans(self.in_parts), strict=True):
                yield tile, rows, columns


def _spans(sizes: Sequence[int]) -> list[slice]:
    return [slice(*ends) for ends in pairwise(accumulate(sizes, initial=0))]


@torch.no_grad()
def _widen_fan(tile: nn.Linear, in_features: int) -> None:
    """Shrink what `nn.Linear` draws for its own number of inputs to what it draws for `in_features`."""
    factor = math.sqrt(tile.in_features / in_features)
    for param in tile.parameters() if factor != 1.0 else ():
        param.mul_(factor)


def _check_splits(which: str, features: int, splits: int) -> None:
    for name, value in ((f"{which}_features", features), (f"{which}_splits", splits)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"TiledLinear({name}=...): got {value!r}; wanted a whole number from 1 on")
    if splits > features:
        raise ValueError(
            f"TiledLinear({which}_splits=...): got {splits} for {features} features; wanted no more parts than features"
        )
