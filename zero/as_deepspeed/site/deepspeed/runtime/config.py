"""A JSON that is read and checked, by DeepSpeed's names."""

from typing import Any

import torch.distributed as dist

from zero.config import load
from zero.config.read import read
from zero.optim.lr import schedule_problems

ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER = "adagrad", "adam", "adamw", "lamb"
LION_OPTIMIZER, MUON_OPTIMIZER = "lion", "muon"
# Not in zero; programs compare the name of theirs with these.
ONEBIT_ADAM_OPTIMIZER, ONEBIT_LAMB_OPTIMIZER, ZERO_ONE_ADAM_OPTIMIZER = "onebitadam", "onebitlamb", "zerooneadam"


class DeepSpeedConfig:
    """The keys of the JSON as attributes, batch sizes completed; `zero_config` is its section `zero_optimization`.

    Raises DeepSpeedConfigError, a ValueError, with one line for everything that is wrong.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        self._param_dict = read(config).values
        self.global_rank, self.world_size = (
            (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        )
        if mpu is not None and hasattr(mpu, "get_data_parallel_world_size"):
            self.world_size = mpu.get_data_parallel_world_size()
        elif mesh_device is not None:
            self.world_size = mesh_device.size()
        self._config = load(config, self.world_size, checks={"scheduler": schedule_problems})
        self.zero_config = self._config.zero_optimization
        self.zero_optimization_stage = self.zero_config.stage
        self.zero_enabled = self.zero_optimization_stage > 0

    def __getattr__(self, name: str) -> Any:
        """Look the key up, or `SECTION_enabled` of a section; optimizer and scheduler have `_name` and `_params`."""
        section, _, last = name.rpartition("_")
        key = {"enabled": "enabled", "name": "type", "params": "params"}.get(last)
        if name.startswith("_"):  # of copies, which ask before there is anything
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'", name=name)
        if key is None or hasattr(self._config, name) or not hasattr(self._config, section):
            return getattr(self._config, name)
        return getattr(getattr(self._config, section), key, None)
