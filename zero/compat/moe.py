"""DeepSpeed's layer of experts: each token goes to the best k by a router, and no expert gets more than its capacity.

S. Rajbhandari et al., "DeepSpeed-MoE", 2022; W. Fedus et al., "Switch Transformers", 2021.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zero.parallel.experts.separate import SeparateExperts


class MoE(nn.Module):
    """`num_experts` copies of `expert`, divided among each `ep_size` neighbours of the ranks; `k` for each token.

    capacity_factor: an expert takes at most so many times its even share of a rank's tokens (times k), and at least
    `min_capacity`; `eval_capacity_factor` is that of eval; without `drop_tokens` there is no limit. With k = 1 and
    `use_rts` it draws those that it takes. use_residual: the sum with `expert` itself, weighted by a layer
    `coefficient`. noisy_gate_policy: in training "Jitter" multiplies what the router sees, and "RSample" (k = 1) draws
    the expert; `top2_2nd_expert_sampling` draws the second of k = 2. Others change nothing.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if num_experts % ep_size or not 1 <= k <= num_experts:
            raise ValueError(
                f"MoE: got num_experts {num_experts}, wanted a multiple of ep_size {ep_size} and at least k {k}"
            )
        if noisy_gate_policy not in (None, "None", "Jitter", "RSample"):
            raise ValueError(f"MoE: got noisy_gate_policy {noisy_gate_policy!r}, wanted None, 'Jitter' or 'RSample'")
        self.num_experts, self.ep_size, self.num_local_experts = num_experts, ep_size, num_experts // ep_size
        capacity = (capacity_factor, eval_capacity_factor, min_capacity) if drop_tokens else None
        gate = _Gate(hidden_size, num_experts, k, capacity, noisy_gate_policy, use_rts, top2_2nd_expert_sampling)
        self.deepspeed_moe = nn.ModuleDict({"gate": gate, "experts": SeparateExperts(expert, num_experts, ep_size)})
        self.use_residual = use_residual
        if use_residual:
            self.mlp, self.coefficient = expert, nn.Linear(hidden_size, 2)

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The output, the auxiliary loss and how many tokens chose each expert; none that is 0 in `used_token` does."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        index, weights, balance, counts = self.deepspeed_moe.gate(tokens, used_token)
        output = self.deepspeed_moe.experts(tokens, index, weights.to(tokens.dtype)).view_as(hidden_states)
        if self.use_residual:
            dense = self.mlp(hidden_states)
            first, second = self.coefficient(hidden_states).softmax(-1).split(1, -1)
            output = output * first + (dense[0] if isinstance(dense, tuple) else dense) * second
        return output, balance, counts


class _Gate(nn.Module):
    """The router, in fp32. capacity: the factors in training and eval, and the least; None for none."""

    def __init__(self, width: int, count: int, k: int, capacity: Any, noise: str | None, *draws: bool) -> None:
        super().__init__()
        self.wg = nn.Linear(width, count, bias=False)
        self.count, self.k, self.capacity, self.noise = count, k, capacity, noise
        self.draws_tokens, self.draws_second = draws

    def forward(self, tokens: Tensor, used: Tensor | None) -> tuple[Tensor, ...]:
        """Experts of each token and their weights [n, k], `count` standing for none; auxiliary loss and counts."""
        seen = tokens.float()
        if self.noise == "Jitter" and self.training:
            seen = seen * torch.empty_like(seen).uniform_(0.99, 1.01)  # as Switch Transformers
        scores = nn.functional.linear(seen, self.wg.weight.float())
        gates = scores.softmax(1)
        index = self._chosen(scores, gates).detach()
        weights = gates.gather(1, index)
        if used is not None:
            index = index.where(used.reshape(-1, 1) != 0, self.count)
        chosen = nn.functional.one_hot(index, self.count + 1)[..., : self.count]
        mean = chosen[:, : 1 if self.k == 2 else self.k].sum(1).float().mean(0)
        balance = (gates.mean(0) * mean).sum() * self.count / (self.k if self.k > 2 else 1)
        if self.capacity is not None:
            index = self._taken(index, weights.detach())
        weights = weights * (index < self.count)
        if self.k > 1:
            weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
        return index, weights, balance, chosen.sum((0, 1))

    def _chosen(self, scores: Tensor, gates: Tensor) -> Tensor:
        if not (self.draws_second if self.k == 2 else self.k == 1 and self.noise == "RSample" and self.training):
            return gates.topk(self.k, 1).indices
        drawn = scores - torch.empty_like(scores).exponential_().log()  # whose largest is a draw from gates (Gumbel)
        first = (drawn if self.k == 1 else gates).argmax(1, keepdim=True)
        return first if self.k == 1 else torch.cat([first, drawn.scatter(1, first, -torch.inf).argmax(1, True)], 1)

    def _taken(self, index: Tensor, weights: Tensor) -> Tensor:
        """Without experts that have their capacity of other tokens: drawn, earlier or (k > 2) heavier ones."""
        train, evaluate, least = self.capacity
        factor = torch.tensor((train if self.training else evaluate) * self.k)
        capacity = max(least, int(torch.ceil(factor * (len(index) / self.count))))  # rounded in fp32, as DeepSpeed's
        ids = index.t().flatten()
        first = weights.t().flatten() * (self.k > 2)
        first = torch.rand_like(first) if self.k == 1 and self.draws_tokens else first
        order = first.argsort(descending=True, stable=True)
        order = order[ids[order].argsort(stable=True)]
        ordered = ids[order]
        place = torch.arange(len(ids), device=ids.device) - torch.searchsorted(ordered, ordered)
        return ids.index_copy(0, order, ordered.where(place < capacity, self.count)).view(self.k, -1).t()


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether there is a layer of experts in the module, and the number of experts of the first one, or 0."""
    counts = [each.num_experts for each in m.modules() if isinstance(each, MoE)]
    return bool(counts), (counts or [0])[0]
