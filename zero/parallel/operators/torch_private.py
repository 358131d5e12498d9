"""Every private name of torch that operators use, with what we need of it: DTensor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import ExplicitRedistributionContext as no_implicit_moves  # noqa: F401

_NUMBERS = itertools.count()
T = TypeVar("T", bound=DTensor)


class _As(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, kind: type[DTensor]) -> DTensor:
        return kind(x._local_tensor.detach(), x._spec, requires_grad=False)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:
        # Operators choose views by what DTensor says of strides, which may be wrong of a gradient.
        return DTensor(grad._local_tensor.contiguous(), grad._spec, requires_grad=False), None


def with_class(x: DTensor, kind: type[T]) -> T:
    """The same tensor as one of another class."""
    return _As.apply(x, kind)


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, placements: Sequence[Placement]) -> torch.Tensor:
        ctx.how = x.device_mesh, placements, x.shape, x.stride()
        return x._local_tensor.detach()  # unlike to_local's no view, which nobody could write into

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[DTensor, None]:
        mesh, placements, shape, stride = ctx.how
        return DTensor.from_local(grad, mesh, placements, run_check=False, shape=shape, stride=stride), None


def local_of(x: DTensor, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
    """This rank's piece, whose gradient is placed as the tensor, or otherwise."""
    return _Local.apply(x, x.placements if grad_placements is None else grad_placements)


def local_shape(x: DTensor) -> tuple[int, ...]:
    """The shape of this rank's piece."""
    return tuple(x._local_tensor.shape)


def device_mesh(ranks: torch.Tensor, groups: Sequence[dist.ProcessGroup]) -> DeviceMesh:
    """A mesh of the global ranks [...], with this rank's group along each dim; collective.

    Of several dims one is made beside them, of all ranks: what all of them do then is one collective.
    """
    number = next(_NUMBERS)  # meshes of one name are taken for each other, also when the groups of one are gone
    names = tuple(f"operators_{number}_{at}" for at in range(ranks.ndim))
    kind = "cuda" if dist.get_backend(groups[0]) == "nccl" else "cpu"
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], kind, ranks, mesh_dim_names=names)
    mesh = DeviceMesh.from_group([*groups], kind, ranks, mesh_dim_names=names)
    mesh._flatten(f"operators_{number}")
    return mesh
