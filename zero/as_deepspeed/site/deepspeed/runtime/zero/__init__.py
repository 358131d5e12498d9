"""What programs know as `deepspeed.zero`."""

from deepspeed._names import finder

_PARTS = "deepspeed.runtime.zero.partition_parameters"
_MODULES = ("config", "offload_config", "partition_parameters", "stage3", "stage_1_and_2", "utils")

__getattr__ = finder(
    __name__,
    {
        **{name: f"deepspeed.runtime.zero.{name}:" for name in _MODULES},
        **dict.fromkeys(("Init", "GatheredParameters", "ZeroParamStatus"), _PARTS),
        **dict.fromkeys(("register_external_parameter", "unregister_external_parameter", "TiledLinear"), "zero"),
    },
)
