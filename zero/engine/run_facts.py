"""What the run folder says of a run at its start: zero/monitor/run_folder.py has the layout."""

from __future__ import annotations

import os
import platform
import sys
import time
from typing import Any

import numpy
import torch

from zero.engine.reality import planned
from zero.memory.available import cores
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
        "crowding": _crowding() if device.type == "cpu" else 0.0,
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
        "plan": _plan(engine) if engine.optimizer is not None else {},
    }


def _crowding() -> float:
    """How many threads of this host's ranks, or of this rank bound to some of them, are there for each core."""
    threads, ranks = torch.get_num_threads(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(threads / cores(), threads * ranks / (os.cpu_count() or 1))


def _plan(engine: Any) -> dict[str, int]:
    """Bytes that are planned to be there at the end of a step, by the kinds that reports of steps have."""
    row = planned(engine._config, engine._sharded)
    host = {} if engine.host_nbytes() is None else {f"host {kind}": each for kind, each in row.host._asdict().items()}
    return {"parameters": row.device.parameters, "optimizer": row.device.masters + row.device.moments} | host
