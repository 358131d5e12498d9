"""Bytes of activations: what a transformer block keeps for its backward, and what head and loss need at most.

The block is that of the example: LayerNorm, attention with rotary positions and without a matrix of scores, LayerNorm,
GELU MLP. Counted are storages, each once: a view keeps the whole that it was cut from.
"""

from __future__ import annotations

from dataclasses import dataclass

_FP32 = 4


@dataclass(frozen=True)
class BlockSizes:
    """One block on one rank: tokens of a micro-batch (all its sequences), channels, heads, bytes per activation.

    inner: channels inside the MLP; None: four times the width;
    copied: attention's result is copied to put heads side by side, as on the CPU; GPU kernels return it so.
    """

    tokens: int
    width: int
    heads: int
    itemsize: int = _FP32
    inner: int | None = None
    copied: bool = True

    @property
    def stream_nbytes(self) -> int:
        """Of one [tokens, width], such as the block's input."""
        return self.itemsize * self.tokens * self.width

    @property
    def inner_nbytes(self) -> int:
        """Of one [tokens, inner]."""
        return self.itemsize * self.tokens * (4 * self.width if self.inner is None else self.inner)

    @property
    def sums_nbytes(self) -> int:
        """Of attention's logarithms of sums, fp32 [tokens, heads]."""
        return _FP32 * self.tokens * self.heads


def whole_nbytes(block: BlockSizes) -> int:
    """Kept without recomputation, the input of the block included.

    Of the width: the inputs of both norms, of the projections behind them and of the output projection; queries and
    keys, turned; queries, keys and values in one, as values are a view of that; the result of attention. Of the inner
    width: the input and the result of GELU. Then a mean and a deviation per token and norm.
    """
    streams = 2 + 2 + 1 + 2 + 3 + int(block.copied)
    statistics = 4 * block.itemsize * block.tokens
    return streams * block.stream_nbytes + 2 * block.inner_nbytes + block.sums_nbytes + statistics


def selective_nbytes(block: BlockSizes, every: int = 1) -> int:
    """Kept where the results of attention and of every so many matrix products stay, the input included.

    The products, in order: queries, keys and values in one, attention's output, up in the MLP. Nothing in the block
    reads the last one, down, in the backward, so its result is not kept.
    """
    products = [3 * block.stream_nbytes, block.stream_nbytes, block.inner_nbytes]
    return 2 * block.stream_nbytes + block.sums_nbytes + sum(products[every - 1 :: every])


def full_nbytes(block: BlockSizes) -> int:
    """Kept where the whole block is recomputed: its input."""
    return block.stream_nbytes


def loss_peak_nbytes(tokens: int, vocabulary: int, width: int) -> int:
    """The most that head and cross entropy of torch hold at once in fp32, beyond hidden states and weight.

    In the backward: the logarithms of probabilities, and the gradients of these and of the logits, each
    [tokens, vocabulary]; the gradient of the weight comes when two of them have gone.
    """
    logits = _FP32 * tokens * vocabulary
    return max(3 * logits, logits + _FP32 * (vocabulary + tokens) * width)


def tiled_loss_peak_nbytes(tokens: int, vocabulary: int, width: int, rows: int) -> int:
    """The same of the tiled loss with slices of `rows` tokens.

    Logits and what they are differentiated through, each [rows, vocabulary], beside the gradients of weight and hidden
    states; and some numbers per token.
    """
    return _FP32 * (2 * rows * vocabulary + (vocabulary + tokens) * width)
