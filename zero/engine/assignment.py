"""Whether a command (`zero check`, `zero tune`) has started this script, and wants a run of its own of it."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

from zero.launch.contract import ASSIGNED


@functools.cache
def assigned_run() -> Any:
    """The `AssignedRun` that this process was started for; None outside of `zero check` and `zero tune`. Read once."""
    text = os.environ.get(ASSIGNED)
    if text is None:
        return None
    values = json.loads(text)
    folder = Path(values.pop("folder"))
    if "trial" in values:
        from zero.tools.tune.trial import Trial, TriedRun

        return TriedRun(Trial(**values["trial"]), folder)
    from zero.tools.check.checked_run import checked_run

    return checked_run(values, folder)
