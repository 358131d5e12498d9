"""Experts that are modules of their own, of which each rank has made its own ones."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from zero.core.kept import kept
from zero.core.owner import is_released, share_along
from zero.plan.grid import EXPERTS


class SeparateExperts(nn.Module):
    """Copies of `expert`: `count` in all, and 1 / `ranks` of them here. Called as `zero.experts` says.

    Their names begin with 0 until an engine is made, which names them among all. The number `count` stands for no
    expert. Raises ValueError for an expert that was born sharded, with the values of one rank.
    """

    def __init__(self, expert: nn.Module, count: int, ranks: int) -> None:
        super().__init__()
        if ranks > 1 and any(map(is_released, expert.parameters())):
            raise ValueError("MoE(ep_size > 1) in zero.Init, where no rank has values of its own; make it outside")
        self.deepspeed_experts = _Numbered(copy.deepcopy(expert) for _ in range(count // ranks))
        self.total, self.ranks = count, ranks
        for param in self.parameters():
            param.allreduce = False  # DeepSpeed's mark, by which programs know them
        if ranks > 1:
            share_along(EXPERTS._replace(parts=()), self.parameters())

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Every expert is called, with a token of zeros where it has none: gradients then come on all ranks alike."""
        ids, out, experts = index.flatten(), torch.zeros_like(x), [*self.deepspeed_experts]
        order = ids.argsort(stable=True)
        counts = kept(lambda: torch.bincount(ids, minlength=len(experts))[: len(experts)].tolist())
        for expert, slots in zip(experts, order[: sum(counts)].split(counts), strict=True):
            tokens = slots // index.shape[1]
            found = expert(x[tokens] if len(slots) else x.new_zeros(1, *x.shape[1:]))
            found = (found[0] if isinstance(found, tuple) else found)[: len(slots)]
            out = out.index_add(0, tokens, (found * weights.flatten()[slots, None]).to(x.dtype))
        return out


class _Numbered(nn.ModuleList):
    """Modules that are found by their places, and whose names begin with another number than 0."""

    def number(self, first: int) -> None:
        self._modules = {str(at): each for at, each in enumerate(self._modules.values(), first)}

    def __getitem__(self, at: Any) -> Any:
        return [*self._modules.values()][at]


def told_experts(model: nn.Module) -> dict[str, int]:
    """The number of ranks that separate experts of a model are made for; ValueError where it is not one number."""
    sizes = {each.ranks for each in model.modules() if isinstance(each, SeparateExperts)} - {1}
    if len(sizes) > 1:
        raise ValueError(f"MoE: got layers of ep_size {sorted(sizes)}; all that divide experts must have the same")
    return dict.fromkeys(["ep"] * len(sizes), *sizes)
