"""How fast devices compute, remember and send: of those with a name from their data sheets, of this machine measured.

Sources of `DEVICES`, dense figures without sparsity, per device; links per direction:

- NVIDIA data sheets of H100 SXM, H200 SXM, HGX B200, A100 SXM 80 GB, V100 SXM2 32 GB, L40S; Ada white paper (4090)
- AMD's data sheet of the Instinct MI300X
- NVLink: half of the published sum of both directions (900 GB/s for H100 and H200); PCIe 3, 4, 5 x16: 16, 32, 64 GB/s
- between hosts: one adapter per device as in DGX A100 (200 Gb/s), H100, H200 and B200 (400 Gb/s); 100 Gb/s elsewhere
- the host: an eighth of the memory (2 TB) and of the memory bandwidth (2 sockets) of such a DGX; one NVMe drive of
  PCIe 4 per device. These are assumed, and differ most from host to host

`fp32` is that of plain fp32 matrix products, not of TF32. What is reached of each figure is in `REACHED`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class Rates:
    """The rates of one rank while all of its host compute: FLOP/s, bytes/s, bytes, seconds. 0: not there, or unknown.

    flops: in the forward and backward of a transformer, by dtype ("fp32", "bf16", "fp16");
    device_bandwidth, host_bandwidth: what the optimizer's step reads and writes, there;
    host_link: between device and host; drive_read, drive_write: this rank's share of the drive;
    intra_host, inter_host: what it sends to ranks of its host, and of others; latency: of one collective;
    device_memory, host_memory: what there is for it;
    recompute: by dtype and policy, how many times as long forward and backward of a block take longer with it; where
    that is not known, it follows from FLOPs and bytes.
    """

    name: str
    flops: Mapping[str, float]
    device_bandwidth: float
    host_bandwidth: float
    host_link: float
    drive_read: float
    drive_write: float
    intra_host: float
    inter_host: float
    latency: float
    device_memory: float
    host_memory: float
    recompute: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


class _Sheet(NamedTuple):
    """A data sheet: FLOP/s in 16 bits and in fp32 (1e12); GB/s of memory, NVLink (0: none), PCIe, network; GB."""

    half: float
    single: float
    memory: float
    peers: float
    pcie: float
    network: float
    gigabytes: float


_SHEETS = {
    "b200": _Sheet(2250, 75, 7700, 900, 64, 50, 180),
    "h200": _Sheet(989, 67, 4800, 450, 64, 50, 141),
    "h100": _Sheet(989, 67, 3350, 450, 64, 50, 80),
    "a100": _Sheet(312, 19.5, 2039, 300, 32, 25, 80),
    "v100": _Sheet(125, 15.7, 900, 150, 16, 12.5, 32),
    "l40s": _Sheet(362, 91.6, 864, 0, 32, 12.5, 48),
    "4090": _Sheet(165, 82.6, 1008, 0, 32, 12.5, 24),
    "mi300x": _Sheet(1307, 163.4, 5300, 448, 64, 50, 192),
}
_HOST_BANDWIDTH, _HOST_MEMORY, _DRIVE_READ, _DRIVE_WRITE = 76e9, 256e9, 7e9, 5e9
# Shares of the figures above. Large transformers reach 0.35 to 0.5 of a device's FLOP/s (torchtitan's and Megatron's
# tables), the fused step 0.9 of its memory bandwidth, messages of tens of MB 0.8 of a link.
REACHED = {"flops": 0.45, "bandwidth": 0.9, "links": 0.8}


def _given(name: str, sheet: _Sheet) -> Rates:
    flops, memory, links = REACHED["flops"], REACHED["bandwidth"], REACHED["links"] * 1e9
    half = {} if name == "v100" else {"bf16": sheet.half * 1e12 * flops}
    return Rates(
        name=name,
        flops={"fp32": sheet.single * 1e12 * flops, "fp16": sheet.half * 1e12 * flops, **half},
        device_bandwidth=sheet.memory * 1e9 * memory,
        host_bandwidth=_HOST_BANDWIDTH * memory,
        host_link=sheet.pcie * links,
        drive_read=_DRIVE_READ * memory,
        drive_write=_DRIVE_WRITE * memory,
        intra_host=(sheet.peers or sheet.pcie) * links,
        inter_host=sheet.network * links,
        latency=20e-6,
        device_memory=sheet.gigabytes * 1e9,
        host_memory=_HOST_MEMORY,
    )


DEVICES: Mapping[str, Rates] = {name: _given(name, sheet) for name, sheet in _SHEETS.items()}
