"""zero, as programs find it that were written for DeepSpeed. Names come from zero when they are first used."""

import zero as _zero
from deepspeed._modules import MODULES
from deepspeed._names import finder

__version__ = f"0.19.6+zero{_zero.__version__}"
version = __version__

__getattr__ = finder(
    __name__,
    {
        **{name: f"deepspeed.{name}:" for name in ("accelerator", "comm", *MODULES) if "." not in name},
        "zero": "deepspeed.runtime.zero:",
        "checkpointing": "zero.checkpointing:",
        "initialize": "deepspeed.runtime.engine",
        "DeepSpeedEngine": "deepspeed.runtime.engine",
        "PipelineEngine": "deepspeed.runtime.engine",
        "PipelineModule": "zero",
        "DeepSpeedConfig": "deepspeed.runtime.config",
        "DeepSpeedConfigError": "deepspeed.runtime.config",
        "DeepSpeedOptimizer": "deepspeed.runtime.base_optimizer",
        "init_distributed": "deepspeed.comm",
        "get_accelerator": "deepspeed.accelerator",
        "add_config_arguments": "zero",
        "tp_model_init": "zero.parallel.tensor.told_sizes",
        "logger": "deepspeed._helpers",
        "log_dist": "deepspeed._helpers",
        "dist": "deepspeed.comm:",
    },
)
