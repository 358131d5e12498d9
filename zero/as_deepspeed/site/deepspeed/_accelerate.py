"""Accelerate at stages 0 to 2: it asks a model for its weights, of which each rank has its experts' alone."""

import functools
import sys
from typing import Any

import zero
from zero.core.owner import cut_of


def gather_parts() -> None:
    """Have what is imported of the library ask an engine for weights that ranks have parts of."""
    library = sys.modules.get("accelerate.accelerator")
    if library is None or library.Accelerator.get_state_dict.__module__ == __name__:
        return
    theirs = library.Accelerator.get_state_dict

    @functools.wraps(theirs, ("__doc__",))
    def get_state_dict(self: Any, model: Any, unwrap: bool = True) -> Any:
        whole = not isinstance(model, zero.Engine) or all(cut_of(param) is None for param in model.module.parameters())
        if whole or model.zero_optimization_stage() == 3:
            return theirs(self, model, unwrap)
        return model._consolidated_16bit_state_dict()

    library.Accelerator.get_state_dict = get_state_dict
