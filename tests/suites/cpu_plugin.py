"""A plugin of pytest: what a suite of another project runs on a GPU only runs here, too, with zero as deepspeed.

The decorators of its tests that ask for devices let them pass; nothing else of the suite is changed. What needs two
devices starts two processes.
"""

from __future__ import annotations

import importlib
from typing import Any

importlib.import_module("zero.as_deepspeed")  # before what looks for deepspeed
testing = importlib.import_module("accelerate.test_utils.testing")
ASKED_FOR = ("require_non_cpu", "require_multi_device")


def let_pass(test: Any) -> Any:
    """In the place of a decorator."""
    return test


for name in ASKED_FOR:
    setattr(testing, name, let_pass)
testing.device_count = 2
testing.DEFAULT_LAUNCH_COMMAND = testing.get_launch_command(num_processes=2, monitor_interval=0.1)
