"""The bits that today's configurations train to: a hash of each, to compare two commits on one machine.

python benchmarks/bits.py            a line for each configuration: hash of losses, norms, weights, state
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from json import dumps, loads
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

CPU = {"device": "cpu"}
BOTH = {"offload_optimizer": CPU, "offload_param": CPU}
NVME = {"device": "nvme", "nvme_path": "FOLDER"}
MUON = {"type": "Muon", "params": {"lr": 1e-2, "muon_lr": 2e-2}}
LAMB = {"type": "Lamb", "params": {"lr": 1e-2}}
CODED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
# (world, JSON in the words of tests/scenario.py)
CASES: list[tuple[int, dict[str, Any]]] = [
    (2, {"stage": 0}),
    (3, {"stage": 1, "precision": "bf16"}),
    (2, {"stage": 2, "gradient_clipping": 0.5, "accumulation": 2}),
    (4, {"stage": 3, "cut": True}),
    (3, {"stage": 3, "precision": "fp16", "gradient_clipping": 0.5}),
    (4, {"stage": 3, "precision": "bf16", "cut": True, "zero": {"reduce": "tree"}, "accumulation": 2}),
    (4, {"stage": 2, "zero": {"shard_size": 2, "reduce": "ranks"}, "gradient_clipping": 0.3}),
    (4, {"stage": 3, "cut": True, "section": {"zero_hpz_partition_size": 2}, "precision": "bf16"}),
    (2, {"stage": 3, "cut": True, "section": CODED}),
    (2, {"stage": 2, "section": {"offload_optimizer": CPU}, "accumulation": 2}),
    (2, {"stage": 3, "cut": True, "section": BOTH, "precision": "bf16"}),
    (2, {"stage": 3, "cut": True, "section": {"offload_optimizer": NVME, "offload_param": NVME}}),
    (2, {"stage": 1, "optimizer": MUON, "gradient_clipping": 0.5}),
    (4, {"stage": 3, "cut": True, "optimizer": MUON, "zero": {"shard_size": 2}}),
    (2, {"stage": 2, "optimizer": LAMB, "precision": "bf16"}),
    (4, {"stage": 1, "zero": {"shard_size": 2, "reduce": "tree"}, "section": {"offload_optimizer": CPU}}),
]


def digest(record: Any) -> str:
    """Of what a rank of a scenario leaves."""
    total = hashlib.sha256(repr((record.losses, record.norms, record.skipped)).encode())
    tensors = {**record.weights, **{f"exact {name}": value for name, value in record.exact.items()}}
    for key, values in record.moments.items():
        tensors |= {f"{key} {name}": value for name, value in values.items()}
    for name in sorted(tensors):
        total.update(name.encode() + tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def main() -> None:
    """Print a line for each case."""
    from ranks import Pool
    from scenario import scenario

    pool = Pool(4)
    with tempfile.TemporaryDirectory() as folder:
        for world, json in CASES:
            given = loads(dumps(json).replace("FOLDER", folder))
            records = scenario(pool, "tied", given, world, 4, state=True)
            print(*(digest(record)[:12] for record in records), world, json, flush=True)
    pool.close()


if __name__ == "__main__":
    main()
