"""The promise: ring attention as it is taught is exact, and sends keys and values W - 1 times each; ours agrees."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from marks import longer

from zero.core.world import make_world
from zero.examples import ring_attention as example
from zero.parallel import ring
from zero.parallel.ring import Masking
from zero.parallel.sequence import Sequence
from zero.plan.sequences import pieces


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, *longer(3, 4)])
@pytest.mark.parametrize("causal", [True, False])
def test_the_taught_form_is_exact_and_an_oracle(causal: bool, world: int) -> None:
    torch.manual_seed(0)
    whole = [torch.randn(2, 3, 12, 4, dtype=torch.float64) for _ in range(4)]
    query, key, value = (each.clone().requires_grad_() for each in whole[:3])
    right = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
    wanted = right, *torch.autograd.grad(right, (query, key, value), whole[3])
    shared = make_world()
    sequence = Sequence(shared, pieces(12, world, False), ((2, (0, 12)),))
    for form in ("taught", "ours"):
        *inputs, grad = (sequence.piece(each, 2).requires_grad_() for each in whole)
        with mock.patch.object(example, "pass_on", wraps=example.pass_on) as passed:
            if form == "taught":
                out = example.ring_attention(*inputs, dist.group.WORLD, causal)
                assert passed.call_count == 2 * (world - 1)  # of keys, and of values
            else:
                out = ring.attend(*inputs, sequence, Masking(causal), 0.5)
            found = out, *torch.autograd.grad(out, inputs, grad.detach())
        for mine, theirs in zip(found, wanted, strict=True):
            assert (mine - sequence.piece(theirs, 2)).abs().max() <= 1e-14
    shared.watchdog.close()
