"""The optimizers that our kernels run: their arguments, and when torch's own class runs instead."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from zero.config.values import Betas, Bool, Fraction, NotNegative, Parts, Section, choice, integer, refuse


class States(Section):
    """How the state of an optimizer is kept."""

    master: choice("fp32", "remainder") | None = None
    """The form of the masters: remainder (2 bytes, the low half of an fp32 number whose upper half is the bf16
    parameter) or fp32 (4 bytes). Both give the same numbers; default: remainder under bf16, fp32 otherwise."""
    moments: choice("fp32", "bf16", "8bit") = "fp32"
    """The format of the moments: 4, 2 or 1 + 1/64 bytes each. bf16 and 8bit are rounded at random, equally in every
    run; vectors and parameters of fewer than 4096 elements keep fp32."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_given(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if value is not None}


class Arguments(Section):
    """Arguments that the optimizers have in common."""

    lr: NotNegative = 1e-3
    """The learning rate."""
    weight_decay: NotNegative = 0.0
    """The decay of the weights."""
    zero: States | None = Field(default_factory=States)
    """How the state is kept, for optimizers that do not run as torch's own class."""


class TorchArguments(Arguments):
    """Arguments that only torch's own class knows; true selects it."""

    maximize: Bool | None = None
    """Maximize the loss; true selects torch's own class."""
    foreach: Bool | None = None
    """torch's loop over tensors; true selects torch's own class."""
    fused: Bool | None = None
    """torch's fused kernel; true selects torch's own class."""


class AdamParams(TorchArguments):
    """The arguments of Adam and AdamW."""

    betas: Betas = (0.9, 0.999)
    """The decay of the two running means."""
    eps: NotNegative = 1e-8
    """Added to the root of the second mean."""
    bias_correction: Bool = True
    """Correct the means for their start at zero."""
    adam_w_mode: Bool = True
    """Decay the weights themselves (AdamW), not the gradient."""
    torch_adam: Bool = False
    """Use torch's own class."""
    amsgrad: Bool = False
    """The AMSGrad variant, which is not available."""
    fp32_optimizer_states: Bool = True
    """Keep the means in fp32; `zero` sets a smaller format."""


class LambParams(Arguments):
    """The arguments of LAMB."""

    betas: Betas = (0.9, 0.999)
    """The decay of the two running means."""
    eps: NotNegative = 1e-8
    """Added to the root of the second mean."""
    bias_correction: Bool = True
    """Correct the learning rate for the start of the means at zero."""
    max_coeff: NotNegative = 10.0
    """The upper limit of the factor of the learning rate: a parameter's norm over its update's norm."""
    min_coeff: NotNegative = 0.01
    """The lower limit of that factor."""
    eps_inside_sqrt: Bool = False
    """Add eps under the root, which is not available."""
    amsgrad: Bool = False
    """The AMSGrad variant, which is not available."""

    @model_validator(mode="after")
    def _coefficients_are_in_order(self) -> "LambParams":
        if self.min_coeff > self.max_coeff:
            raise refuse("min_coeff to be at most max_coeff")
        return self


class LionParams(Arguments):
    """The arguments of Lion."""

    lr: NotNegative = 1e-4
    """The learning rate: each step changes every weight by it."""
    betas: Betas = (0.9, 0.99)
    """The share of the mean in the direction, and the decay of the mean."""


class SgdParams(TorchArguments):
    """The arguments of SGD."""

    momentum: NotNegative = 0.0
    """The decay of the sum of gradients; 0 keeps no sum."""
    dampening: Fraction = 0.0
    """The part of the gradient that does not enter the sum."""
    nesterov: Bool = False
    """Use Nesterov momentum."""

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> "SgdParams":
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise refuse("with nesterov a momentum above 0 and no dampening")
        return self


class AdagradParams(TorchArguments):
    """The arguments of Adagrad."""

    lr: NotNegative = 1e-2
    """The learning rate."""
    lr_decay: NotNegative = 0.0
    """How fast the learning rate falls with the steps."""
    eps: NotNegative = 1e-10
    """Added to the root of the sum."""
    initial_accumulator_value: NotNegative = 0.0
    """The initial value of the sum of squares."""


class MuonParams(Arguments):
    """The arguments of Muon, for matrices of hidden layers, and of AdamW, for all other parameters beside it."""

    muon_lr: NotNegative | None = None
    """The learning rate of Muon; default: lr."""
    adam_lr: NotNegative | None = None
    """The learning rate of AdamW; default: lr."""
    momentum: NotNegative = 0.95
    """The decay of Muon's mean of gradients."""
    nesterov: Bool = True
    """Look ahead by one more momentum."""
    ns_method: choice("gram", "standard") = "gram"
    """gram: Newton-Schulz on all matrices of one shape at once, on their Gram matrices if that costs less.
    standard: one matrix at a time, bitwise as torch.optim.Muon."""
    ns_steps: integer(1, 99) = 5
    """How many iterations."""
    adjust_lr_fn: choice("original", "match_rms_adamw") = "original"
    """How the learning rate depends on the shape of a matrix, as in torch.optim.Muon."""
    beta2: Fraction | None = None
    """NorMuon: the decay of the mean square of each row of an update, by whose root the row is divided; null: Muon."""
    split: Parts = Field(default_factory=dict)
    """Fused projections, by patterns of parameter names: the number of equal parts of the rows, or the rows of
    each part."""
    betas: Betas = (0.9, 0.95)
    """The decay of the two means of AdamW."""
    eps: NotNegative = 1e-10
    """Added to the root of the second mean of AdamW."""


ARGUMENTS: Mapping[str, type[Arguments]] = {
    "adam": AdamParams,
    "adamw": AdamParams,
    "lamb": LambParams,
    "lion": LionParams,
    "sgd": SgdParams,
    "adagrad": AdagradParams,
    "muon": MuonParams,
}


ONLY_TORCH = ("torch_adam", "maximize", "foreach", "fused")
"""Arguments that select torch's own class when they are true."""


def torch_reason(kind: str, params: Mapping[str, Any]) -> str | None:
    """Why optimizer `kind` with `params` runs as torch's own class; None when our kernels run it."""
    if kind.lower() not in ARGUMENTS:
        return "our kernels run Adam, AdamW, Lamb, Lion, SGD and Adagrad only"
    return next((f"{key!r} is true" for key in ONLY_TORCH if params.get(key) == 1), None)
