"""What the run folder says of a run at its start: zero/monitor/run_folder.py has the layout."""

from __future__ import annotations

import platform
import sys
import time
from typing import Any

import numpy
import torch

from zero.monitor.step_report import finite
from zero.plan.formats import ITEMSIZE


def run_facts(engine: Any) -> dict[str, Any]:
    """The value of run.json: configuration, ranks, versions, units."""
    config = engine._config
    device = engine.device
    return {
        "time": time.time(),
        "configuration": finite(config.model_dump(mode="json", exclude={"raw": True, "comet": {"api_key"}})),
        "world": engine.world_size,
        "stage": config.zero_optimization.stage,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "versions": {
            "zero": sys.modules["zero"].__version__,
            "torch": str(torch.__version__),
            "numpy": numpy.__version__,
            "python": platform.python_version(),
        },
        "units": [
            {
                "name": unit.plan.name,
                "numel": (numel := sum(spec.numel for spec in unit.plan.params)),
                "bytes": numel * ITEMSIZE[unit.plan.dtype],
                "dtype": unit.plan.dtype,
            }
            for unit in engine._sharded.units
        ],
    }
