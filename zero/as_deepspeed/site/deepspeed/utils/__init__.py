"""`zero.utils` by the name `deepspeed.utils`, and the log."""

import zero.utils
from deepspeed._names import finder

__getattr__ = finder(
    __name__,
    {
        **dict.fromkeys(zero.utils.__all__, "zero.utils"),
        **dict.fromkeys(("logger", "log_dist"), "deepspeed.utils.logging"),
        "groups": "deepspeed.utils.groups:",
        "logging": "deepspeed.utils.logging:",
        "timer": "deepspeed.utils.timer:",
        "torch": "deepspeed.utils.torch:",
        "zero_to_fp32": "deepspeed.utils.zero_to_fp32:",
        "RepeatingLoader": "zero",
        "is_initialized": "deepspeed.comm",
    },
)
