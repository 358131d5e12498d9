"""What one may ask an engine: answers straight from its configuration, under DeepSpeed's names."""

from __future__ import annotations

from typing import Any

import torch

from zero.config import Config


class Queries:
    """Read-only methods over `self._config` and `self.optimizer`; mixed into the engine."""

    _config: Config
    optimizer: Any
    module: torch.nn.Module
    world_size: int
    global_rank: int
    global_steps: int

    def train_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self._config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per forward on one rank."""
        return self._config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self._config.gradient_accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps)."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def zero_optimization(self) -> bool:
        """Whether anything is cut at all."""
        return self._config.zero_optimization.stage > 0

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self._config.zero_optimization.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether reduced gradients are cut (stages 2 and 3)."""
        return self._config.zero_optimization.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are cut between uses (stage 3)."""
        return self._config.zero_optimization.stage >= 3

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """The key `stage3_gather_16bit_weights_on_model_save`."""
        return self._config.zero_optimization.stage3_gather_16bit_weights_on_model_save

    def fp16_enabled(self) -> bool:
        """Whether parameters are fp16."""
        return self._config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are bf16."""
        return self._config.bf16.enabled

    def torch_autocast_enabled(self) -> bool:
        """Whether the forward runs under torch.autocast."""
        return self._config.torch_autocast.enabled

    def amp_enabled(self) -> bool:
        """Always False: there is no apex here."""
        return False

    def dynamic_loss_scale(self) -> bool:
        """Whether the configuration lets the loss scale adapt by itself (fp16 only)."""
        return self._config.scales_loss and self._config.fp16.loss_scale == 0

    def loss_scale(self) -> float:
        """The loss scale of the configuration: 0 when it is dynamic, 1 outside fp16. Now: `optimizer.loss_scale`."""
        return float(self._config.fp16.loss_scale) if self._config.scales_loss else 1.0

    def gradient_clipping(self) -> float:
        """The largest global gradient norm that is not clipped; 0 means no clipping."""
        return self._config.gradient_clipping

    def steps_per_print(self) -> float:
        """Optimizer steps between progress lines; inf for none."""
        return self._config.steps_per_print

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return self._per_group("lr")

    def get_mom(self) -> list[Any]:
        """The momentum, or Adam's betas, of each parameter group."""
        return self._per_group("betas" if self._has("betas") else "momentum")

    def get_type(self) -> list[str]:
        """The optimizer's name, once per parameter group."""
        name = self._config.optimizer.type if self._config.optimizer else "client"
        return [name for _ in self.optimizer.param_groups] if self.optimizer else []

    @property
    def basic_optimizer(self) -> Any:
        """The optimizer; nothing is wrapped by it that one could step."""
        return self.optimizer

    @property
    def mp_world_size(self) -> int:
        """Ranks that share one sample's model: always 1."""
        return 1

    @property
    def seq_dp_world_size(self) -> int:
        """Ranks over which gradients are averaged."""
        return self.world_size

    @property
    def param_names(self) -> dict[torch.nn.Parameter, str]:
        """The name of each parameter of the module."""
        return {param: name for name, param in self.module.named_parameters()}

    @property
    def gas_boundary_ctr(self) -> int:
        """Accumulation boundaries so far."""
        return self.global_steps

    def get_data_parallel_rank(self) -> int:
        """This process among those that see different samples."""
        return self.global_rank

    def get_model_parallel_rank(self) -> int:
        """Always 0."""
        return 0

    def get_tensor_parallel_rank(self) -> int:
        """Always 0."""
        return 0

    def _per_group(self, key: str) -> list[Any]:
        return [group.get(key) for group in self.optimizer.param_groups] if self.optimizer else []

    def _has(self, key: str) -> bool:
        return bool(self.optimizer) and all(key in group for group in self.optimizer.param_groups)
