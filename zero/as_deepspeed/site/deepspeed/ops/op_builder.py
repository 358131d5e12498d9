"""Builders of DeepSpeed's kernels: zero builds its own with its wheel, so that there is nothing to load."""

from collections import defaultdict
from typing import Any

_KERNELS = ("async_io", "cpu_adam", "cpu_adagrad", "cpu_lion", "fused_adam", "fused_lamb", "fused_lion")
__compatible_ops__ = defaultdict(bool, dict.fromkeys(_KERNELS, True))


class OpBuilder:
    """Says whether what DeepSpeed builds so is here."""

    NAME = "op"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether it works on this machine."""
        return __compatible_ops__[self.NAME]

    def load(self, verbose: bool = True) -> Any:
        """Raise NotImplementedError: kernels of zero are no modules of their own."""
        raise NotImplementedError(
            f"{type(self).__name__}.load(): zero, which is here as deepspeed, has no such module; the classes of "
            "deepspeed.ops and offload_optimizer of the JSON run its kernels"
        )


_BUILDERS = {
    "AsyncIOBuilder": "async_io",
    "CPUAdamBuilder": "cpu_adam",
    "CPUAdagradBuilder": "cpu_adagrad",
    "CPULionBuilder": "cpu_lion",
    "FusedAdamBuilder": "fused_adam",
    "FusedLambBuilder": "fused_lamb",
    "FusedLionBuilder": "fused_lion",
    "FPQuantizerBuilder": "fp_quantizer",
    "InferenceBuilder": "transformer_inference",
    "QuantizerBuilder": "quantizer",
    "SparseAttnBuilder": "sparse_attn",
    "TransformerBuilder": "transformer",
    "UtilsBuilder": "utils",
}
globals().update({name: type(name, (OpBuilder,), {"NAME": op}) for name, op in _BUILDERS.items()})
