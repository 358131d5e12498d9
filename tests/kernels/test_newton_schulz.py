"""The promise: Newton-Schulz on many matrices, or on their Gram matrices, is at most twice as far off as torch's."""

from __future__ import annotations

import pytest
import torch
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, _zeropower_via_newtonschulz

from zero.kernels import newton_schulz as kernel

COEFFICIENTS, STEPS, EPS = (DEFAULT_A, DEFAULT_B, DEFAULT_C), 5, 1e-7


def exact(matrix: torch.Tensor) -> torch.Tensor:
    x = matrix.double()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm()
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(48, 48), (32, 128), (128, 32), (30, 40), (1, 9)])
def test_as_near_to_the_truth_as_torch(shape, dtype, monkeypatch):
    forms = []
    for name in ("_gram", "_iterate"):
        form = getattr(kernel, name)
        monkeypatch.setattr(kernel, name, lambda *a, form=form, name=name: forms.append(name) or form(*a))
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    matrices[2] *= 1e-3
    found = kernel.newton_schulz(matrices, COEFFICIENTS, STEPS, EPS, dtype)
    for one, matrix in zip(found, matrices, strict=True):
        wanted = exact(matrix)
        torchs = _zeropower_via_newtonschulz(matrix.float(), COEFFICIENTS, STEPS, EPS)
        assert (one.double() - wanted).norm() <= 2 * (torchs.double() - wanted).norm()
    assert forms == ["_gram" if max(shape) > 1.5 * min(shape) else "_iterate"]


def test_zeros_stay_zeros():
    assert torch.equal(
        kernel.newton_schulz(torch.zeros(2, 4, 9), COEFFICIENTS, STEPS, EPS, torch.float32), torch.zeros(2, 4, 9)
    )
