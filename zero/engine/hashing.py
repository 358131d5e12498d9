"""64-bit hashes of the bits of tensors, to compare what several ranks hold without sending it.

Each word of 8 bytes is mixed with its place (splitmix64: Steele, Lea & Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014) and the mixed words are added modulo 2^64. Mixing is one to one, so a change of a single
word is always seen; of several, all but one in about 2^64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero.plan.layout import Span

WORD = 8  # bytes
_PLACE, _FIRST, _SECOND = (
    constant - (1 << 64) for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


@torch.no_grad()
def hash_spans(flat: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
    """One hash for each span of a contiguous tensor [n], int64 [len(spans)] on its device; does not wait for it.

    Spans (elements) begin on words of 8 bytes, and `flat` ends on one; what lies between spans is not looked at.
    """
    per = WORD // flat.itemsize
    words = flat.view(torch.int64)
    out = torch.zeros(len(spans), dtype=torch.int64, device=flat.device)
    chunk = 1 << (16 if flat.device.type == "cpu" else 24)  # words: what a CPU's cache holds, what keeps a GPU busy
    for begin in range(0, words.numel(), chunk):
        mixed = _mixed(words[begin : begin + chunk], begin)
        for index, span in enumerate(spans):
            common = Span(span.start // per, span.numel // per).intersect(Span(begin, mixed.numel()))
            if common.numel:
                out[index] += mixed.narrow(0, common.start - begin, common.numel).sum()
    for index, span in enumerate(spans):
        if span.numel % per:  # the last word is shared with what is not ours
            last = words.narrow(0, span.stop // per, 1)
            out[index] += _mixed(last & (1 << 8 * flat.itemsize * (span.numel % per)) - 1, span.stop // per)[0]
    return out


@torch.no_grad()
def hash_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The hash of any dense tensor, int64 [] on its device; copies it. Its dtype and shape do not count."""
    flat = tensor.detach().reshape(-1)  # whose elements may lie apart
    own = torch.zeros(-(-flat.nbytes // WORD) * WORD, dtype=torch.uint8, device=flat.device)
    own[: flat.nbytes].view(flat.dtype).copy_(flat)
    return hash_spans(own, [Span(0, own.numel())])[0]


@torch.no_grad()
def hash_of(hashes: torch.Tensor) -> torch.Tensor:
    """One hash, int64 [], of several int64 [n] in their order."""
    return _mixed(hashes, 0).sum()


def _mixed(words: torch.Tensor, first: int) -> torch.Tensor:
    """Words int64 [n], the first of which has place `first`, each mixed with its place; a new tensor."""
    z = torch.arange(first + 1, first + 1 + words.numel(), device=words.device).mul_(_PLACE).add_(words)
    z = _folded(z, 30).mul_(_FIRST)
    z = _folded(z, 27).mul_(_SECOND)
    return _folded(z, 31)


def _folded(z: torch.Tensor, bits: int) -> torch.Tensor:
    """z ^ (z >> bits) in place; torch's shift brings copies of the sign in, which must not take part."""
    return z.bitwise_xor_((z >> bits).bitwise_and_((1 << 64 - bits) - 1))
