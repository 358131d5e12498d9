"""What torch this is, in the shape in which programs for DeepSpeed ask for it."""

import torch

from deepspeed import __version__
from deepspeed.accelerator import get_accelerator


def _short(version: str | None) -> str:
    return ".".join((version or "0.0").split(".")[:2])


_nccl = torch.cuda.nccl.version() if torch.cuda.is_available() and torch.distributed.is_nccl_available() else (0, 0)

version = __version__
torch_info = {
    "version": _short(torch.__version__),
    "bf16_support": get_accelerator().is_bf16_supported(),
    "cuda_version": _short(torch.version.cuda),
    "nccl_version": ".".join(map(str, _nccl[:2])),
    "hip_version": _short(torch.version.hip),
}
