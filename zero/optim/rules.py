"""How one unit's shard is updated: our fused Adam, or any element-wise optimizer of `torch.optim`."""

from __future__ import annotations

import difflib
import inspect
from typing import Any, Protocol

import torch
from torch import nn

from zero.core.unit import Unit
from zero.kernels.adam import adam_step

# These look at whole matrices or at the whole model, which a shard is not.
NOT_ELEMENTWISE = {
    "Adafactor": "it factors the second moment over rows and columns of whole matrices",
    "LBFGS": "it needs a closure and inner products over the whole model",
    "Muon": "it orthogonalizes whole matrices",
    "SparseAdam": "it needs sparse gradients, and gradients here are dense",
}


class Rule(Protocol):
    """Updates the shard of one unit with one parameter group's hyperparameters."""

    defaults: dict[str, Any]

    def update(self, unit: Unit, group: dict[str, Any], factor: float) -> None:
        """Apply one step with gradient = `factor` x `unit.gradients.shard`; writes master and shard."""

    def nbytes(self, unit: Unit) -> int:
        """Bytes of the optimizer state that the rule keeps for the unit, master not counted."""


class AdamRule:
    """Adam and AdamW in one fused pass over the shard (Kingma & Ba 2015; Loshchilov & Hutter 2019).

    As in DeepSpeed, "Adam" means decoupled weight decay unless `adam_w_mode` is false.
    """

    def __init__(self, params: dict[str, Any]) -> None:
        params = {key: value for key, value in params.items() if key not in ("torch_adam", "amsgrad")}
        self._decoupled = bool(params.pop("adam_w_mode", True))
        self.defaults = {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0.0,
            "bias_correction": True,
            **params,
        }
        self.defaults["betas"] = tuple(self.defaults["betas"])
        self._moments: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._steps: dict[int, int] = {}

    def update(self, unit: Unit, group: dict[str, Any], factor: float) -> None:
        """One step of Adam on the unit's shard; see `Rule.update`."""
        exp_avg, exp_avg_sq = self.moments(unit)
        self._steps[unit.index] = step = self._steps.get(unit.index, 0) + 1
        beta1, beta2 = group["betas"]
        adam_step(
            unit.master,
            exp_avg,
            exp_avg_sq,
            unit.gradients.shard,
            None if unit.master is unit.shard else unit.shard,
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            step=step,
            decoupled=self._decoupled,
            bias_correction=bool(group["bias_correction"]),
            grad_scale=factor,
        )

    def moments(self, unit: Unit) -> tuple[torch.Tensor, torch.Tensor]:
        """The unit's exp_avg and exp_avg_sq, fp32 [shard], zeros before the first step."""
        if unit.index not in self._moments:
            self._moments[unit.index] = (torch.zeros_like(unit.master), torch.zeros_like(unit.master))
        return self._moments[unit.index]

    def nbytes(self, unit: Unit) -> int:
        """See `Rule.nbytes`."""
        return sum(tensor.nbytes for tensor in self.moments(unit))


class TorchRule:
    """An optimizer class of `torch.optim` on fp32 shards: one instance per unit, fed by the unit's group."""

    def __init__(self, kind: type[torch.optim.Optimizer], params: dict[str, Any]) -> None:
        self._kind = kind
        # Constructed once on a throw-away parameter, so that a bad argument fails here and now.
        self.defaults = dict(kind([nn.Parameter(torch.zeros(1))], **params).defaults)
        self._params = params
        self._inner: dict[int, tuple[nn.Parameter, torch.optim.Optimizer]] = {}

    def update(self, unit: Unit, group: dict[str, Any], factor: float) -> None:
        """One step of the torch optimizer on the unit's shard; see `Rule.update`."""
        if unit.index not in self._inner:
            leaf = nn.Parameter(unit.master)
            self._inner[unit.index] = (leaf, self._kind([leaf], **self._params))
        leaf, inner = self._inner[unit.index]
        inner.param_groups[0].update({key: value for key, value in group.items() if key != "params"})
        leaf.grad = unit.gradients.shard.mul_(factor)
        inner.step()
        leaf.grad = None
        if unit.master is not unit.shard:
            unit.shard.copy_(unit.master)

    def nbytes(self, unit: Unit) -> int:
        """See `Rule.nbytes`."""
        if unit.index not in self._inner:
            return 0
        state = self._inner[unit.index][1].state
        return sum(
            value.nbytes for entry in state.values() for value in entry.values() if isinstance(value, torch.Tensor)
        )


def make_rule(kind: str, params: dict[str, Any]) -> Rule:
    """The rule that `optimizer.type` and `optimizer.params` of the JSON name; raises ValueError by JSON path."""
    ours = {"adam": "Adam", "adamw": "AdamW"}
    if kind.lower() in ours and not params.get("torch_adam", False):
        return AdamRule({**params, **({"adam_w_mode": True} if kind.lower() == "adamw" else {})})
    if kind.lower() in ours:
        decoupled = kind.lower() == "adamw" or params.get("adam_w_mode", True)
        kind = "AdamW" if decoupled else "Adam"
        params = {key: v for key, v in params.items() if key not in ("torch_adam", "adam_w_mode", "bias_correction")}
    if kind in NOT_ELEMENTWISE:
        raise ValueError(
            f"optimizer.type: '{kind}' cannot run on shards: {NOT_ELEMENTWISE[kind]}; "
            "use an element-wise optimizer such as AdamW, Adagrad, SGD or RMSprop"
        )
    found = getattr(torch.optim, kind, None)
    if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)) or found is torch.optim.Optimizer:
        known = ["Adam", "AdamW", *sorted(name for name, value in vars(torch.optim).items() if _is_optimizer(value))]
        near = difflib.get_close_matches(kind, known, 1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ValueError(f"optimizer.type: unknown optimizer '{kind}'{hint} Known: {', '.join(dict.fromkeys(known))}")
    try:
        return TorchRule(found, params)
    except (TypeError, ValueError) as error:
        raise ValueError(f"optimizer.params: torch.optim.{kind} refuses {params}: {error}") from error


def _is_optimizer(value: Any) -> bool:
    return (
        inspect.isclass(value)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
        and value.__name__ not in NOT_ELEMENTWISE
    )
