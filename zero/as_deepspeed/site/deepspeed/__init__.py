"""zero, as programs find it that were written for DeepSpeed. Names come from zero when they are first used."""

import zero as _zero
from deepspeed._modules import MODULES, names_from
from deepspeed._names import finder

__version__ = f"0.19.6+zero{_zero.__version__}"
version = __version__

__getattr__ = finder(
    __name__,
    {
        **{name: f"deepspeed.{name}:" for name in ("accelerator", "comm", *MODULES) if "." not in name},
        "zero": "deepspeed.runtime.zero:",
        "checkpointing": "zero.checkpointing:",
        **names_from("deepspeed.runtime.engine", "initialize DeepSpeedEngine PipelineEngine"),
        **names_from("deepspeed.runtime.config", "DeepSpeedConfig DeepSpeedConfigError"),
        **names_from("deepspeed.runtime.base_optimizer", "DeepSpeedOptimizer"),
        **names_from("deepspeed.comm", "init_distributed"),
        **names_from("deepspeed._helpers", "logger log_dist get_accelerator"),
        **names_from("zero", "PipelineModule add_config_arguments tp_model_init"),
        "dist": "deepspeed.comm:",
    },
)
