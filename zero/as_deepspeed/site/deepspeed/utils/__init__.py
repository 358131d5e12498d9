"""`zero.utils` by the name `deepspeed.utils`, and the log."""

from zero.utils import *  # noqa: F403
