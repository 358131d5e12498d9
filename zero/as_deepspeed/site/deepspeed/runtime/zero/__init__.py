"""What programs know as `deepspeed.zero`."""

from deepspeed._names import finder

_PARTS = "deepspeed.runtime.zero.partition_parameters"

__getattr__ = finder(
    __name__,
    {
        "offload_config": "deepspeed.runtime.zero.offload_config:",
        "partition_parameters": f"{_PARTS}:",
        **dict.fromkeys(("Init", "GatheredParameters", "ZeroParamStatus"), _PARTS),
        **dict.fromkeys(("register_external_parameter", "unregister_external_parameter", "TiledLinear"), "zero"),
    },
)
