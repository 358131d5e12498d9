"""The optimizers that the fused step computes: their hyperparameters, and their states per element.

The formulas themselves are written twice: in csrc/step_math.h for the compiled kernels, and in zero/kernels/step.py as
plain torch. An object here names a formula with its numbers. A new one is made when a number changes (the learning
rate does in every step), so it holds nothing else, and needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeAlias, TypeVar

from zero.config.optimizers import Arguments
from zero.plan.formats import Formats

# Of csrc/step_math.h: enum Formula, and Hyper::Flags.
ADAM, LION, MOMENTUM, SGD, ADAGRAD = range(5)
DECOUPLED, BIAS_CORRECTION, NESTEROV = 1, 2, 4

# (code, lr, beta1, beta2, eps, weight_decay, momentum, dampening, lr_decay, flags)
Native: TypeAlias = tuple[int, float, float, float, float, float, float, float, float, int]


class _Checked:
    """The check of all formulas: their numbers are finite and not negative, betas below 1."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name.startswith("beta") and not 0.0 <= value < 1.0:
                raise ValueError(f"{name}: got {value}; wanted a number in [0, 1)")
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name}: got {value}; wanted a finite number, not below 0")


@dataclass(frozen=True)
class Adam(_Checked):
    """Adam (Kingma & Ba, ICLR 2015, algorithm 1) and AdamW (Loshchilov & Hutter, ICLR 2019, algorithm 2).

    decoupled:       True for AdamW; False for L2, weight decay added to the gradient;
    bias_correction: whether to divide the moments by ``1 - beta^step``.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    bias_correction: bool = True

    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    signed: ClassVar[tuple[bool, ...]] = (True, False)

    def native(self) -> Native:
        """The formula as the compiled steps take it."""
        flags = (DECOUPLED if self.decoupled else 0) | (BIAS_CORRECTION if self.bias_correction else 0)
        return ADAM, self.lr, self.beta1, self.beta2, self.eps, self.weight_decay, 0.0, 0.0, 0.0, flags


@dataclass(frozen=True)
class Lion(_Checked):
    """Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023, algorithm 2).

    `beta1` is the share of ``exp_avg`` in the direction, `beta2` the decay of ``exp_avg``; weight decay is decoupled.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0

    state_names: ClassVar[tuple[str, ...]] = ("exp_avg",)
    signed: ClassVar[tuple[bool, ...]] = (True,)

    def native(self) -> Native:
        """The formula as the compiled steps take it."""
        return LION, self.lr, self.beta1, self.beta2, 0.0, self.weight_decay, 0.0, 0.0, 0.0, DECOUPLED


@dataclass(frozen=True)
class Sgd(_Checked):
    """SGD as in ``torch.optim.SGD``; without momentum it has no state (Sutskever et al., ICML 2013, for the rest).

    dampening: the gradient enters the buffer times ``1 - dampening``, but whole in the first step;
    nesterov:  look ahead by one more ``momentum``; needs momentum and no dampening.
    Weight decay is L2.
    """

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.dampening <= 1.0:
            raise ValueError(f"dampening: got {self.dampening}; wanted a number in [0, 1]")
        if self.nesterov and not (self.momentum > 0.0 and self.dampening == 0.0):
            raise ValueError(
                f"nesterov: got momentum {self.momentum} and dampening {self.dampening} with it; "
                "wanted momentum above 0 and dampening 0"
            )

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the states, in the order in which the step takes them."""
        return ("momentum_buffer",) if self.momentum else ()

    @property
    def signed(self) -> tuple[bool, ...]:
        """For each state whether it can be negative."""
        return (True,) if self.momentum else ()

    def native(self) -> Native:
        """The formula as the compiled steps take it."""
        code, flags = MOMENTUM if self.momentum else SGD, NESTEROV if self.nesterov else 0
        return code, self.lr, 0.0, 0.0, 0.0, self.weight_decay, self.momentum, self.dampening, 0.0, flags


@dataclass(frozen=True)
class Adagrad(_Checked):
    """Adagrad (Duchi, Hazan & Singer, JMLR 2011) as in ``torch.optim.Adagrad``, with L2 as weight decay.

    The learning rate falls with ``1 / (1 + (step - 1) * lr_decay)``.
    """

    lr: float
    lr_decay: float = 0.0
    eps: float = 1e-10
    weight_decay: float = 0.0

    state_names: ClassVar[tuple[str, ...]] = ("sum",)
    signed: ClassVar[tuple[bool, ...]] = (False,)

    def native(self) -> Native:
        """The formula as the compiled steps take it."""
        return ADAGRAD, self.lr, 0.0, 0.0, self.eps, self.weight_decay, 0.0, 0.0, self.lr_decay, 0


@dataclass(frozen=True)
class Muon(_Checked):
    """Muon as in ``torch.optim.Muon`` (K. Jordan, 2024), which is not a fused step: see zero/optim/matrix.py.

    lr:       before the adjustment to the shape of a matrix;
    eps:      the smallest norm that a matrix is divided by;
    ns_steps: Newton-Schulz iterations;
    beta2:    of NorMuon, decay of the mean square of each row.
    Weight decay is decoupled.
    """

    lr: float
    momentum: float = 0.95
    weight_decay: float = 0.0
    eps: float = 1e-7
    ns_steps: int = 5
    beta2: float = 0.0

    state_names: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    signed: ClassVar[tuple[bool, ...]] = (True,)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ns_steps >= 100:
            raise ValueError(f"ns_steps: got {self.ns_steps}; wanted an integer below 100")


Formula: TypeAlias = Adam | Lion | Sgd | Adagrad
Hyperparameters: TypeAlias = Mapping[str, Any]  # of a parameter group
_Of = TypeVar("_Of", Adam, Lion, Sgd, Adagrad, Muon)
_CONVERT = {"float": float, "bool": bool, "int": int}


def _made(kind: type[_Of], group: Hyperparameters, **more: object) -> _Of:
    """The formula of this kind with the numbers of a parameter group, and `more` in their place."""
    numbers = dict(group)
    if "betas" in group:
        numbers["beta1"], numbers["beta2"] = group["betas"]
    numbers |= more
    return kind(**{field.name: _CONVERT[str(field.type)](numbers[field.name]) for field in fields(kind)})


FORMULAS: Mapping[str, Callable[[Hyperparameters], Formula | Muon]] = {
    # As in DeepSpeed, "Adam" means decoupled weight decay unless `adam_w_mode` is false.
    "adam": lambda group: _made(Adam, group, decoupled=group["adam_w_mode"]),
    "adamw": lambda group: _made(Adam, group, decoupled=True),
    # The rest of it: zero/optim/lamb.py.
    "lamb": lambda group: _made(Adam, group, decoupled=True, bias_correction=False),
    "lion": lambda group: _made(Lion, group),
    "sgd": lambda group: _made(Sgd, group),
    "adagrad": lambda group: _made(Adagrad, group),
    "muon": lambda group: (
        _made(Muon, group, beta2=group.get("beta2") or 0.0) if group["use_muon"] else _made(Adam, group, decoupled=True)
    ),
}


def formats_of(kind: str, params: Arguments, compute_dtype: str, groups: Sequence[Hyperparameters] = ()) -> Formats:
    """How the state of optimizer `kind`, a key of FORMULAS, is kept with these arguments and this dtype of parameters.

    `groups`: the parameter groups, if they keep different states.
    """
    master, moments = (params.zero.master, params.zero.moments) if params.zero else (None, "fp32")
    master = master or ("remainder" if compute_dtype == "bf16" else "fp32")
    largest = {**dict(params), "use_muon": False, "bias_correction": True}  # of Muon and the AdamW beside it
    states, *by_group = (len(FORMULAS[kind](largest | dict(group)).state_names) for group in ({}, *groups))
    return Formats(master, moments, states, tuple(by_group))
