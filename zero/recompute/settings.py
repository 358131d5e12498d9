"""How the inputs of recomputed calls rest: the section `activation_checkpointing` as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from zero.config.sections import ActivationCheckpointing


@dataclass(frozen=True)
class RestSettings:
    """Under the names of the JSON, shortened; `count` is the number of calls that `contiguous` takes room for."""

    partition: bool = False
    contiguous: bool = False
    count: int | None = None
    host: bool = False
    synchronize: bool = False
    profile: bool = False

    def __post_init__(self) -> None:
        if self.contiguous and self.count is None:
            raise ValueError(
                "contiguous_checkpointing: it needs num_checkpoints (number_checkpoints in the JSON), "
                "the number of calls to take room for"
            )
        if self.count is not None and (
            isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1
        ):
            raise ValueError(f"num_checkpoints: got {self.count!r}, wanted an integer of at least 1")

    @classmethod
    def of(cls, section: ActivationCheckpointing) -> RestSettings:
        """As the JSON says."""
        return cls(
            section.partition_activations,
            section.contiguous_memory_optimization,
            section.number_checkpoints,
            section.cpu_checkpointing,
            section.synchronize_checkpoint_boundary,
            section.profile,
        )
