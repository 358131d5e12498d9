"""Whether the parameters are still what the engine was made for, before each step."""

from __future__ import annotations

from zero.core.unit import Unit


def check_parameters(unit: Unit) -> None:
    """Raise RuntimeError, naming the parameter, where one has another shape, dtype, device or requires_grad.

    So too where one that is trained has a gradient of its own: ours are taken from there as they land.
    """
    for spec, param, trained in zip(unit.plan.params, unit.params, unit.required_grad, strict=True):
        if unit.master is not None and param.grad is not None:
            raise RuntimeError(
                f"parameter '{spec.name}' of {unit.buffer.name}: its .grad was assigned, and no step would use it; "
                "call zero.utils.safe_set_full_grad(param, value) between backward() and step() on all ranks, or "
                "set .grad to None"
            )
        if param.requires_grad != trained:
            # Thawed, it would silently not be trained; frozen, weight decay and momentum would still move it.
            raise RuntimeError(
                f"parameter '{spec.name}' of {unit.buffer.name}: requires_grad was {trained} at initialize() and "
                f"is now {param.requires_grad}; set it before initialize(). To train it in some steps only, give "
                "it a parameter group of its own, whose lr is 0 in the others"
            )
    if unit.cut:
        return  # released ones refuse every change themselves
    for spec, param, view in zip(unit.plan.params, unit.params, unit.buffer.views, strict=True):
        if param.dtype != view.dtype or param.device != view.device or param.shape != view.shape:
            raise RuntimeError(
                f"parameter '{spec.name}' of {unit.buffer.name} was {view.dtype} {tuple(view.shape)} on "
                f"{view.device} and is now {param.dtype} {tuple(param.shape)} on {param.device}; move, convert and "
                "resize a model before initialize(), which then decides"
            )
