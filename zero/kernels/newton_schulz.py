"""Newton-Schulz iterations: the nearest (almost) orthogonal matrix, for Muon.

The quintic iteration is that of K. Jordan, "Muon" (2024), as ``torch.optim.Muon`` has it. The Gram form iterates on
the small square ``X X^T`` and multiplies the wide matrix only three times ("Gram Newton-Schulz", tridao.me, 2026);
it restarts after two steps, which keeps it exact enough in 16 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

RESTART = 2  # steps of the Gram form after which the matrix itself is multiplied


def newton_schulz(
    matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float, dtype: torch.dtype
) -> Tensor:
    """The iteration on matrices [k, rows, cols] of any floating dtype, all at once, in and of `dtype`.

    coefficients: a, b, c of ``a X + b (X X^T) X + c (X X^T)^2 X``; eps: the smallest divisor of a matrix, which is
    otherwise its Frobenius norm.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.to(torch.promote_types(dtype, torch.float32))
    x = (x / x.flatten(1).norm(dim=1).clamp(min=eps)[:, None, None]).to(dtype)
    x = x.mT if tall else x
    rows, cols = x.shape[-2:]
    # Products of an iteration: 4 rows^2 cols + 2 rows^3; of the Gram form: 8 rows^2 cols, and some 28 rows^3 in all.
    form = _gram if 8 * cols + 28 * rows < steps * (4 * cols + 2 * rows) else _iterate
    x = form(x, coefficients, steps)
    return x.mT if tall else x


def _iterate(x: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    a, b, c = coefficients
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _gram(x: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """X_k = Q_k X with Q the product of ``a + Z``, ``Z = b R + c R^2``, and ``R = Q X X^T Q``, all symmetric."""
    a, b, c = coefficients
    for count in (min(RESTART, steps), max(0, steps - RESTART)):
        gram, product = x @ x.mT, torch.eye(x.shape[-2], dtype=x.dtype, device=x.device).expand(len(x), -1, -1)
        for step in range(count):
            z = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            product = torch.baddbmm(product, z, product, beta=a)
            if step + 1 < count:
                half = torch.baddbmm(gram, z, gram, beta=a)
                gram = torch.baddbmm(half, z, half, beta=a)
        x = product @ x
    return x
