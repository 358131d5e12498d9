"""Sizes of slices of tokens."""

from __future__ import annotations

from itertools import pairwise

# A matrix product with fewer rows takes kernels that add up in another order, and runs far below its speed.
FEWEST_ROWS = 16


def token_slices(tokens: int, size: int) -> list[range]:
    """Cut `tokens` rows into slices of `size`; the last is shorter, or takes up to `FEWEST_ROWS - 1` rows more."""
    starts = list(range(0, tokens, size))
    if len(starts) > 1 and tokens - starts[-1] < min(size, FEWEST_ROWS):
        starts.pop()  # what is left is too little for a product of its own
    return [range(*ends) for ends in pairwise([*starts, tokens])]


def default_size(tokens: int, width: int, on_gpu: bool) -> int:
    """Rows of a slice when nobody says: an eighth of them, within what keeps products efficient and memory small.

    Every slice reads and writes the gradient of the whole weight, vocabulary x width in fp32. A GPU multiplies so much
    faster than it reads that this is little beside the product only where a slice has about as many rows as the weight
    is wide; a CPU is done with it from a hundred rows on.
    """
    if on_gpu:
        return min(max(-(-tokens // 8), width, 1024), 4096)
    return min(max(-(-tokens // 8), 128), 384)
