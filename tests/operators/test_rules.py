"""The promise: whatever function is cut and however, its numbers and gradients are those of one process, or an error.

DTensor's rules do the work, and not all of them are right: what it gives wrong is refused by us.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from marks import longer
from operator_models import engine_of
from torch import Tensor, nn
from torch.nn import functional as F

import zero
from zero.core.comm import local_device
from zero.parallel.operators.operator import Cutter
from zero.parallel.operators.strategy import plan_mesh, strategy_of

B = S = D = 8
CASES = [(4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 1, 1)]


def order(x: Tensor) -> Tensor:
    return x.detach().argsort(1)


def heads(x: Tensor) -> Tensor:
    return x.view(B, S, 2, 4).transpose(1, 2)


ELEMENTS: list[Callable[[Tensor], Tensor]] = [
    *(F.gelu, F.silu, F.softplus, F.elu, torch.sigmoid, torch.nan_to_num),
    *(lambda x: x.clamp(-0.5, 0.5), lambda x: x**2, lambda x: (x * x + 1).sqrt(), lambda x: x + torch.ones_like(x)),
    *(lambda x: torch.where(x > 0, x, x * 0.1), lambda x: x.masked_fill(x.detach() < 0, 0.5)),
    *(lambda x: torch.lerp(x, x * 2, 0.3), lambda x: torch.addcmul(x, x, x, value=0.5), lambda x: F.threshold(x, 0, 1)),
    *(lambda x: x * torch.ones(S, D).tril(), lambda x: x + torch.arange(S)[:, None], lambda x: x + x.new_ones(D)),
]
OTHERS: list[Callable[[Tensor], Tensor]] = [
    *(lambda x: x.softmax(-1), lambda x: x.softmax(1), lambda x: F.log_softmax(x, -1), lambda x: x.logsumexp(1)),
    *(lambda x: F.layer_norm(x, (D,)), lambda x: F.layer_norm(x, (S, D)), lambda x: F.rms_norm(x, (D,))),
    *(lambda x: F.group_norm(x, 4), F.instance_norm, lambda x: F.batch_norm(x, None, None, training=True)),
    *(lambda x: x.mean(-1), lambda x: x.mean(1), lambda x: x.sum((1, 2)), lambda x: x - x.mean(), lambda x: x.var(-1)),
    *(lambda x: x - x.mean(1, keepdim=True), lambda x: x.std(0) * x, lambda x: x.prod(1), lambda x: x.norm(dim=1)),
    *(lambda x: x / x.norm(), lambda x: F.normalize(x, dim=-1), lambda x: F.normalize(x, dim=1)),
    *(lambda x: x.max(-1).values, lambda x: x.amax(1), lambda x: x.min(1).values, lambda x: x * x.max()),
    *(lambda x: x.cumsum(1), lambda x: x.cumsum(0), lambda x: x.cumprod(-1), lambda x: x.cummax(1).values),
    *(lambda x: x.sort(1).values, lambda x: x.topk(3, -1).values, lambda x: x.topk(3, 1).values),
    *(lambda x: x * (x.argmax(-1, keepdim=True) + 1), lambda x: x * (x.argmax(1, keepdim=True) + 1)),
    *(lambda x: x.median(1).values, lambda x: x.kthvalue(2, 1).values, lambda x: x * (x > 0).sum()),
    *(lambda x: x * (x > 0).any(1, keepdim=True), lambda x: x * F.one_hot(x.detach().argmax(-1), D)),
    *(lambda x: x.gather(1, order(x)), lambda x: torch.zeros_like(x).scatter_add(1, order(x), x)),
    *(lambda x: x.index_select(1, torch.tensor([3, 1, 0])), lambda x: x[:, [3, 1, 0]], lambda x: x[:, 1:5]),
    *(lambda x: x[..., ::2], lambda x: x[:, 2], lambda x: x[:, -1], lambda x: sum(x.unbind(1)), lambda x: x.tril()),
    *(lambda x: x.roll(1, 1), lambda x: x.roll(1, -1), lambda x: x.flip(1), lambda x: x.flip(-1), lambda x: x.roll(1)),
    *(lambda x: torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1), lambda x: torch.cat([x, x * 2], 1)),
    *(lambda x: torch.cat([x[:4], x[4:] * 2]), lambda x: torch.cat(x.split(4, 1)[::-1], 1), lambda x: F.glu(x, 1)),
    *(lambda x: torch.stack([x, x * 2], 1), lambda x: torch.stack([x, x * 2], -1), lambda x: F.pad(x, (1, 2))),
    *(lambda x: F.pad(x, (0, 0, 1, 0)), F.glu, lambda x: x.chunk(2, 1)[1], lambda x: x.narrow(2, 1, 4)),
    *(lambda x: x.transpose(1, 2), lambda x: x.transpose(0, 1), lambda x: x.flatten(1), lambda x: x.flatten(0, 1)),
    *(heads, lambda x: x.unflatten(1, (2, 4)), lambda x: x.reshape(B, S * 2, D // 2), lambda x: x.unsqueeze(1)),
    *(lambda x: x.unsqueeze(1).expand(B, 3, S, D), lambda x: x.repeat(1, 2, 1), lambda x: x.repeat_interleave(2, 1)),
    *(lambda x: torch.einsum("bsd,btd->bst", x, x), lambda x: x @ x.transpose(1, 2), lambda x: torch.bmm(x, x)),
    *(lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x, lambda x: x[..., None] * x[..., None, :]),
    *(lambda x: torch.cdist(x, x), lambda x: x.diagonal(dim1=1, dim2=2), lambda x: x.diff(dim=1)),
    *(lambda x: F.max_pool1d(x, 2), lambda x: F.avg_pool1d(x, 2), lambda x: F.interpolate(x, scale_factor=2)),
    *(
        F.hardtanh,
        F.relu6,
        lambda x: x.unfold(1, 2, 1),
        lambda x: torch.fft.rfft(x, dim=1).abs(),
    ),
    *(lambda x: F.embedding(order(x), torch.eye(S)).sum(-1) * x, lambda x: F.scaled_dot_product_attention(x, x, x)),
    lambda x: F.cross_entropy(x, x.detach().argmin(1), reduction="none"),
    *(lambda x: F.cross_entropy(x.flatten(0, 1), x.detach().argmin(-1).flatten()), lambda x: x.mean()),
    *(lambda x: F.binary_cross_entropy_with_logits(x, (x.detach() > 0).float()), lambda x: x.sum(), lambda x: x.max()),
    lambda x: F.kl_div(F.log_softmax(x, -1), F.softmax(x.flip(1), -1), reduction="batchmean"),
]
# Of these torch gives some wrong without a word.
WRONG: list[Callable[[Tensor], Tensor]] = [
    *(lambda x: F.conv1d(x, torch.ones(4, S, 3), padding=1), lambda x: F.conv2d(x[:, None], torch.ones(2, 1, 3, 3))),
    *(lambda x: F.conv1d(x, torch.ones(S, 1, 3), groups=S), lambda x: F.conv_transpose1d(x, torch.ones(S, 4, 3))),
    *(lambda x: x.cumsum(-1), lambda x: x.cumsum(dim=-2), lambda x: x.cumprod(-1), lambda x: x.logcumsumexp(-1)),
    *(
        lambda x: F.mse_loss(x, x.flip(1)),
        lambda x: F.l1_loss(x, x * 0),
        lambda x: F.mse_loss(x, x * 2, reduction="sum"),
    ),
    *(lambda x: F.huber_loss(x, x * 0), lambda x: F.smooth_l1_loss(x, x * 0)),
    lambda x: F.soft_margin_loss(x, x.detach().sign()),
    lambda x: F.binary_cross_entropy(x.sigmoid(), (x.detach() > 0).float()),
    lambda x: F.cross_entropy(x, x.detach().argmin(1), ignore_index=2),
    lambda x: F.cross_entropy(x, x.detach().argmin(1), weight=torch.arange(1.0, S + 1)),
    lambda x: F.nll_loss(F.log_softmax(x, 1), x.detach().argmin(1), ignore_index=2),
]


ALL = [*ELEMENTS, *OTHERS, *WRONG]


def outcome(cutter: Cutter, function: Callable[[Tensor], Tensor], whole: Tensor) -> str:
    """Of the result and of the gradient."""
    wanted = function(whole)
    loss = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)) * 1.0
    (wanted * loss).sum().backward()
    rank = dist.get_rank()
    own = whole.detach().chunk(4)[rank].to(local_device()).requires_grad_()
    try:
        out = cutter(function, [], (own,), {})
        rows = out * 1.0
    except ValueError as error:
        return "refused" if "has no rule" in str(error) or "of which 4 ranks" in str(error) else f"unnamed: {error}"
    except RuntimeError as error:
        return "refused" if "zero.shard: 'f', of this rank's pieces" in str(error) else f"unnamed: {error}"
    own_loss = loss.chunk(4)[rank] if rows.ndim else loss / 4  # all ranks have a number, and their gradients add up
    expected = wanted.chunk(4)[rank] if rows.ndim else wanted
    if rows.shape != expected.shape or not torch.allclose(rows.cpu(), expected, rtol=1e-5, atol=1e-5):
        return "wrong"
    try:
        (rows * own_loss.to(rows.device)).sum().backward()
    except (RuntimeError, NotImplementedError):  # torch says so itself
        return "refused"
    gradient = whole.grad.chunk(4)[rank]
    return "right" if torch.allclose(own.grad.cpu(), gradient, rtol=1e-4, atol=1e-4) else "wrong gradient"


@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", [CASES[0], CASES[5], *longer(*((each,) for each in CASES))])
def test_all_functions_are_right_or_refused(case: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    zero.shard(model[1], ((2, 2),))  # makes a mesh of (2, 2), on which all cases can be said
    engine = engine_of(model)
    strategies = [strategy_of("f", torch.relu, each, None) for each in ((case,), ((2, 2),))]
    shape, (placing, _) = plan_mesh(4, strategies)
    assert shape == (2, 2)
    cutter = Cutter(engine._training.forms.operators.mesh, strategies[0], placing)
    whole = torch.randn(B, S, D, generator=torch.Generator().manual_seed(0))
    found = {at: outcome(cutter, each, whole.clone().requires_grad_()) for at, each in enumerate(ALL)}
    engine.destroy()
    right = [at for at, each in found.items() if each == "right"]
    assert not {at: each for at, each in found.items() if each not in ("right", "refused")}, found
    assert right[: len(ELEMENTS)] == [*range(len(ELEMENTS))]
    assert len(right) > len(ALL) // 4
