"""Which operations are worth keeping: matrix products and attention take the time, all else is cheap to repeat."""

from __future__ import annotations

import enum
import functools
from typing import Any


class Kind(enum.Enum):
    """What an operation is to a policy."""

    PRODUCT = "product"
    ATTENTION = "attention"
    CHEAP = "cheap"


_PRODUCTS = {
    *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "linear"),
    *("_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "_int_mm"),
    *("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"),
}
_ATTENTION = ("attention", "flash_attn")  # in the names of torch's own fused ones and of those of packages


@functools.cache
def kind_of(op: Any) -> Kind:
    """The kind of an operator of the dispatcher, such as `torch.ops.aten.mm.default`.

    One that writes into its arguments is repeated whatever it costs: the result would be kept, what it wrote not.
    """
    if getattr(getattr(op, "_schema", None), "is_mutable", False):
        return Kind.CHEAP
    name = str(op).lower()  # namespace.name.overload
    parts = name.split(".")
    if (parts[1] if len(parts) > 1 else name) in _PRODUCTS:
        return Kind.PRODUCT
    if any(word in name for word in _ATTENTION) and "backward" not in name:
        return Kind.ATTENTION
    return Kind.CHEAP
