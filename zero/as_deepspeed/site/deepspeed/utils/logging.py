"""DeepSpeed's log: a logger below that of zero."""

import logging
from collections.abc import Sequence

from zero.log import logger as _zero_logger
from zero.log import rank

logger = _zero_logger.getChild("deepspeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks only; None or -1 among them: on all."""
    if ranks is None or rank() in ranks or -1 in ranks:
        logger.log(level, "[Rank %d] %s", rank(), message)
