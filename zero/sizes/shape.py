"""A transformer of about so many parameters, as the planner sees a model: nothing is allocated."""

from __future__ import annotations

import math
from typing import NamedTuple

from zero.plan.units import ModuleNode, ParamSpec

VOCABULARY = 32_000
_ASPECT = 128  # width / layers of a model whose layers are not given: 7B has 32 of 4096, 70B 80 of 8192
_STEP = 128  # widths are multiples of it
_MOST = 1e15  # parameters
_MOST_LAYERS = 1024  # each is planned by itself


class Shape(NamedTuple):
    """A decoder: `layers` blocks of attention (4 width²) and a gated MLP (3 width x inner), embedding and head.

    The head has weights of its own. Vectors are those of two norms for each block, and one behind the last.
    """

    layers: int
    width: int
    inner: int
    vocabulary: int

    def __str__(self) -> str:
        return (
            f"a transformer of {self.numel:,} parameters: {self.layers} layers of width {self.width:,}, gated MLPs of "
            f"{self.inner:,}, a vocabulary of {self.vocabulary:,} with embedding and head apart"
        )

    @property
    def numel(self) -> int:
        """Parameters in all."""
        blocks = self.layers * sum(self._block(0).values())
        return blocks + 2 * self.vocabulary * self.width + self.width

    def tree(self) -> ModuleNode:
        """Its modules."""
        blocks = [ModuleNode(f"blocks.{index}", "Block", tuple(self._block(index))) for index in range(self.layers)]
        kinds = {"embed": "Embedding", "norm": "RMSNorm", "head": "Linear"}
        first, *last = (ModuleNode(name, kind, (f"{name}.weight",)) for name, kind in kinds.items())
        return ModuleNode(
            "", "Transformer", (), (first, ModuleNode("blocks", "ModuleList", (), (*blocks,), True), *last)
        )

    def specs(self, dtype: str) -> list[ParamSpec]:
        """Its parameters in order, all trained, in one group of the optimizer."""
        table, norm = self.vocabulary * self.width, self.width
        sizes = {"embed.weight": table}
        for index in range(self.layers):
            sizes |= self._block(index)
        sizes |= {"norm.weight": norm, "head.weight": table}
        return [ParamSpec(name, size, dtype, True, 0, ndim=1 if "norm" in name else 2) for name, size in sizes.items()]

    def _block(self, index: int) -> dict[str, int]:
        square, wide = self.width**2, self.width * self.inner
        sizes = {"norm1": self.width, "q": square, "k": square, "v": square, "o": square, "norm2": self.width}
        sizes |= {"gate": wide, "up": wide, "down": wide}
        return {f"blocks.{index}.{name}.weight": numel for name, numel in sizes.items()}


def shape_of(numel: float, layers: int | None = None, width: int | None = None) -> Shape:
    """A shape of `numel` parameters, to within a thousandth where there are a million or more.

    layers, width: where they are known; else such that width is about 128 times layers, as it is in large models. The
    MLPs take what attention, embedding and head leave. Raises ValueError where that is nothing, and out of bounds.
    """
    if not 1000 <= numel <= _MOST:
        wanted = f"at least 1000 and at most {_MOST:g}, such as 7e9"
        raise ValueError(f"number of parameters: got {numel:g}, wanted {wanted}")
    for name, value in (("layers", layers), ("width", width)):
        if value is not None and value < 1:
            raise ValueError(f"{name}: got {value}, wanted an integer of at least 1")
    why = "" if layers else f", as {numel:g} parameters of width {width} make; give the layers, or a larger width"
    if layers is None and width is None:
        layers = min(_MOST_LAYERS, max(1, round((numel / (12 * _ASPECT**2)) ** (1 / 3))))
    elif layers is None:
        layers = max(1, round(numel / (12 * width**2)))
    if layers > _MOST_LAYERS:
        raise ValueError(f"layers: got {layers:,}, wanted at most {_MOST_LAYERS:,}{why}")
    if width is None:
        exact = math.sqrt(numel / (12 * layers))
        width = max(1, round(exact / _STEP)) * _STEP if exact >= _STEP else max(1, int(exact))
    vocabulary = max(1, min(VOCABULARY, int(numel / (8 * width))))
    rest = numel - 2 * vocabulary * width - width
    inner = round((rest / layers - 4 * width**2 - 2 * width) / (3 * width))
    if inner < 1:
        least = 4 * layers * width**2 + 2 * vocabulary * width
        raise ValueError(
            f"{numel:g} parameters make no transformer of {layers} layers of width {width}, whose attention, embedding "
            f"and head alone have {least:.3g}; give fewer layers, or a smaller width"
        )
    return Shape(layers, width, inner, vocabulary)
