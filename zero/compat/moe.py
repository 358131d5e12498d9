"""DeepSpeed's layer of experts: each token goes to the best k by a router, and no expert gets more than its capacity.

S. Rajbhandari et al., "DeepSpeed-MoE", 2022; W. Fedus et al., "Switch Transformers", 2021; D. Lepikhin et al.,
"GShard", 2020.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero.parallel.experts.separate import SeparateExperts

_JITTER = 1e-2  # Switch Transformers'


class Routed(NamedTuple):
    """The experts [n, k] of each token and their weights; the number of experts is that of none.

    balance: the auxiliary loss; counts: the tokens that chose each expert, before any was dropped.
    """

    index: Tensor
    weights: Tensor
    balance: Tensor
    counts: Tensor


class MoE(nn.Module):
    """`num_experts` copies of `expert`, divided among each `ep_size` neighbours of the ranks.

    k:                    the experts of each token;
    capacity_factor:      an expert takes at most so many times its even share of a rank's tokens (times k), and at
                          least `min_capacity`; `eval_capacity_factor` is used in eval;
    use_residual:         the sum with `expert` itself, weighted by a layer `coefficient`;
    noisy_gate_policy:    in training "Jitter" multiplies what the router sees, and "RSample" (k = 1) draws the expert;
    drop_tokens:          False: no capacity;
    use_rts:              with k = 1, those that an expert takes are drawn, and not the first ones;
    top2_2nd_expert_sampling: with k = 2, the second expert is drawn.

    The others are for DeepSpeed's kernels and its experts that are cut, and change nothing here.
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
        if num_experts % ep_size:
            raise ValueError(f"MoE: ep_size {ep_size} does not divide num_experts {num_experts}")
        if not 1 <= k <= max(2, num_experts):
            raise ValueError(f"MoE: k {k} is not one of 1 to {num_experts}, the number of experts")
        if noisy_gate_policy not in (None, "None", "Jitter", "RSample"):
            raise ValueError(f"MoE: noisy_gate_policy {noisy_gate_policy!r} is not None, 'Jitter' or 'RSample'")
        self.num_experts, self.ep_size, self.num_local_experts = num_experts, ep_size, num_experts // ep_size
        self.use_residual = use_residual
        factors = capacity_factor, eval_capacity_factor
        capacity = (*factors, min_capacity) if drop_tokens else None
        gate = _Gate(hidden_size, num_experts, k, capacity, noisy_gate_policy, use_rts, top2_2nd_expert_sampling)
        self.deepspeed_moe = _Layer(gate, SeparateExperts(expert, num_experts, ep_size))
        if use_residual:
            self.mlp, self.coefficient = expert, nn.Linear(hidden_size, 2)

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The output, the auxiliary loss and how many tokens chose each expert.

        used_token: 0 for each token that no expert gets (padding), and whose output is 0.
        """
        output, routed = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            dense = self.mlp(hidden_states)
            dense = dense[0] if isinstance(dense, tuple) else dense
            first, second = self.coefficient(hidden_states).softmax(-1).split(1, -1)
            output = output * first + dense * second
        return output, routed.balance, routed.counts


class _Layer(nn.Module):
    def __init__(self, gate: _Gate, experts: SeparateExperts) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts

    def forward(self, x: Tensor, used: Tensor | None) -> tuple[Tensor, Routed]:
        tokens = x.reshape(-1, x.shape[-1])
        routed = self.gate(tokens, used)
        return self.experts(tokens, routed.index, routed.weights.to(x.dtype)).view_as(x), routed


class _Gate(nn.Module):
    """The router, in fp32. capacity: the factors in training and eval, and the least; None for none."""

    def __init__(self, width: int, experts: int, k: int, capacity: Any, noise: str | None, *draws: bool) -> None:
        super().__init__()
        self.wg = nn.Linear(width, experts, bias=False)
        self.k, self.capacity, self.noise = k, capacity, noise
        self.draws_tokens, self.draws_second = draws

    def forward(self, tokens: Tensor, used: Tensor | None) -> Routed:
        seen, count = tokens.float(), self.wg.weight.shape[0]
        if self.noise == "Jitter" and self.training:
            seen = seen * torch.empty_like(seen).uniform_(1 - _JITTER, 1 + _JITTER)
        scores = nn.functional.linear(seen, self.wg.weight.float())
        gates = scores.softmax(1)
        index = self._chosen(scores, gates).detach()
        chosen = torch.zeros_like(gates).scatter_(1, index, 1.0)
        if used is not None:
            used = used.reshape(-1, 1) != 0
            index, chosen = index.where(used, count), chosen * used
        counts = chosen.sum(0).long()
        of_balance = chosen if self.k != 2 else nn.functional.one_hot(index[:, 0], count + 1)[:, :-1].float()
        balance = (gates.mean(0) * of_balance.mean(0)).sum() * count / (self.k if self.k > 2 else 1)
        weights = gates.gather(1, index.clamp(max=count - 1))
        if self.capacity is not None:
            index = self._taken(index, weights.detach(), count)
        weights = weights * (index < count)
        if self.k > 1:
            weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
        return Routed(index, weights, balance, counts)

    def _chosen(self, scores: Tensor, gates: Tensor) -> Tensor:
        """The experts of each token [n, k], before any is dropped."""
        if self.k == 1 and self.noise == "RSample" and self.training:
            return _drawn(scores).argmax(1, keepdim=True)
        if self.k != 2:
            return gates.topk(self.k, 1).indices
        first = gates.argmax(1, keepdim=True)
        others = _drawn(scores) if self.draws_second else scores
        return torch.cat([first, others.scatter(1, first, float("-inf")).argmax(1, keepdim=True)], 1)

    def _taken(self, index: Tensor, weights: Tensor, count: int) -> Tensor:
        """The experts of each token, without those that have their capacity of others, which come before it.

        With k = 1 these are drawn ones or earlier ones, with k = 2 earlier ones, first choices first, and with more
        those that the router gives a larger weight.
        """
        train, evaluate, least = self.capacity
        factor = (train if self.training else evaluate) * self.k
        # In fp32, as DeepSpeed rounds it.
        capacity = max(least, int(torch.ceil(torch.tensor(factor) * (len(index) / count))))
        ids = index.t().flatten()
        if self.k == 2 or (self.k == 1 and not self.draws_tokens):
            order = ids.argsort(stable=True)
        else:
            first = torch.rand(ids.shape, device=ids.device) if self.k == 1 else weights.t().flatten()
            order = first.argsort(descending=True, stable=True)
            order = order[ids[order].argsort(stable=True)]
        ordered = ids[order]
        place = torch.arange(len(ids), device=ids.device) - torch.searchsorted(ordered, ordered)
        kept = ids.index_copy(0, order, torch.where(place < capacity, ordered, count))
        return kept.view(self.k, -1).t()


def _drawn(scores: Tensor) -> Tensor:
    """Scores with the noise whose largest is a draw from their softmax (Gumbel)."""
    return scores - torch.empty_like(scores).exponential_().log()


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether there is a layer of experts in the module, and the number of experts of the first one, or 0."""
    first = next((each for each in m.modules() if isinstance(each, MoE)), None)
    return first is not None, 0 if first is None else first.num_experts
