"""FLOPs of a model's forward."""

import time
from typing import Any

import torch
from torch import nn

from zero.config.monitor_sections import FlopsProfiler
from zero.engine.profiles import peak
from zero.monitor.flops import FlopsProfile, si
from zero.sizes.recorder import FORMULAS


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Any = (),
    kwargs: Any = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Any = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """(FLOPs, multiplications with their addition, parameters) of one forward, as texts or numbers.

    The model takes `args` and `kwargs`, or ones of `input_shape`; with mode "generate" it generates. The profile goes
    into the log, or to `output_file`. `ignore_modules` are in the totals as there, and are listed here, too.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"get_model_profile(model=...): got a {type(model).__name__}; wanted a torch.nn.Module")
    first = next(model.parameters(), torch.empty(0))
    if input_shape is not None:
        args = [torch.ones(input_shape, dtype=first.dtype, device=first.device)]
    if mode not in ("forward", "generate") or not (args or kwargs):
        raise ValueError(
            f"get_model_profile(mode={mode!r}): wanted forward or generate, and input_shape, args or kwargs"
        )
    shown = {"detailed": detailed, "module_depth": module_depth, "top_modules": top_modules}
    section = FlopsProfiler(**shown, output_file=output_file, profile_step=0)
    dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(first.dtype, "fp32")
    profile = FlopsProfile(section, model, first.device, lambda: peak(dtype, first.device), FORMULAS)
    call, was, took = model.generate if mode == "generate" else model, model.training, 0.0
    model.eval()
    try:
        for step in range(-warm_up, 3 if print_profile else 2):
            profile.step_ended(step, took)
            start = time.perf_counter()
            if step < 2:
                with torch.enable_grad():  # without, it would not be the model's own forward that is counted
                    call(*args, **(kwargs or {}))
            took = time.perf_counter() - start
    finally:
        profile._stop()
        model.train(was)
    flops, params = profile.forward + profile.apart, sum(param.numel() for param in model.parameters())
    if as_string:
        return si(flops), f"{si(flops // 2)}MACs", si(params)
    return flops, flops // 2, params
