from typing import Any

from pydantic import Field

from zero.config.values import Bool, Section


class TensorParallel(Section):
    autotp_size: int = 0
    tp: dict[str, Any] = Field(default_factory=dict)
    sequence_parallel: Bool = False
    broadcast_batch: Bool = False
    reduce: str = "sum"
    blocks: int = 8
    partition_config: Any = None
