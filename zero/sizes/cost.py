"""The cost of a model: FLOPs, and bytes of activations under each policy of recomputation. Plain values, no torch.

Traced from a module by zero/sizes/model_trace.py, or by formula from a `Shape`. All numbers are of one sample at a
length of `sequence` tokens; parameters, their gradients and the samples themselves are not in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from zero.sizes.shape import Shape

POLICIES = ("none", "selective", "full", "host")
"""As `zero.recompute.policy`; "host" is full with `activation_checkpointing.cpu_checkpointing`."""
LOSS = "<loss>"
_HEAD = 128  # channels of an attention head in large models
_FP32 = 4


@dataclass(frozen=True)
class UnitCost:
    """One unit in one forward and backward.

    name:            the path of its module, as `UnitPlan.anchor`: "" is the root, what lies in no other unit;
    kind:            the class of the module, as `zero.recompute.modules` names it;
    recomputable:    whether policies make a difference: it is a block that has a forward;
    forward_flops, backward_flops: as torch.utils.flop_counter counts, 2 for a multiplication and its addition;
    saved:           policy -> bytes that it keeps on the device from forward to backward, its input included;
    recompute_flops: policy -> what backward computes again;
    working:         the most bytes alive inside, in forward or backward, beyond saved["none"].
    """

    name: str
    kind: str
    recomputable: bool
    forward_flops: float
    backward_flops: float
    saved: Mapping[str, float]
    recompute_flops: Mapping[str, float]
    working: float

    def on_host(self, policy: str) -> float:
        """Bytes that it keeps in host memory from forward to backward."""
        return self.saved["full"] - self.saved["host"] if policy == "host" else 0.0


@dataclass(frozen=True)
class ModelCost:
    """Units in the order of their use.

    What comes after the last block (norm, head, loss) keeps nothing in `units`: it keeps `logits_saved` from forward to
    backward, and has `logits` bytes alive at most, those included. notes: what was assumed.
    """

    units: tuple[UnitCost, ...]
    logits: float
    logits_saved: float
    sequence: int
    notes: tuple[str, ...] = ()

    @property
    def flops(self) -> float:
        """Of forward and backward, without recomputation: those of the model."""
        return sum(unit.forward_flops + unit.backward_flops for unit in self.units)

    def activations(self, policy: str = "none", micro_batch: int = 1) -> float:
        """Bytes that units keep on the device from forward to backward; `logits_saved` comes on top."""
        return micro_batch * sum(unit.saved[policy] for unit in self.units)

    def on_host(self, policy: str = "none", micro_batch: float = 1) -> float:
        """Bytes that units keep in host memory meanwhile."""
        return micro_batch * sum(unit.on_host(policy) for unit in self.units)

    def peak(self, policy: str = "none", micro_batch: int = 1) -> float:
        """The most bytes that activations, logits included, take on the device at any time."""
        return micro_batch * max(alive for _, alive, _ in self.moments(policy))

    def moments(self, policy: str = "none") -> list[tuple[str, float, float]]:
        """Each unit's name, the most bytes alive while its backward runs, and those still there when it has ended.

        The loss is the last of them. While the backward of a unit runs, all that it keeps without recomputation is
        there, and what the units before it keep; and where inputs rest on the host, that of the unit before is on its
        way back. What the root keeps is there all the time.
        """
        found, kept, coming = [], 0.0, 0.0
        for unit in sorted(self.units, key=lambda unit: bool(unit.name)):
            alive = kept + coming + max(unit.saved[policy], unit.saved["none"]) + unit.working
            found.append((unit.name, alive, kept))
            kept += unit.saved[policy]
            coming = unit.on_host(policy)
        return [*found, (LOSS, kept + self.logits, kept)]


def shape_cost(shape: Shape, sequence: int, itemsize: int = 2) -> ModelCost:
    """By formula, with attention that keeps no scores, fused norms, and cross entropy in fp32, as on a GPU.

    itemsize: bytes of an activation. A block keeps, of the width, the inputs of both norms, what they give, queries,
    keys and values, and what attention gives; of the inner width what gate and up give, SiLU's result and the product;
    and fp32 numbers of norms and attention. In its backward, three gradients of the inner width are alive when one of
    those four has gone, beside those of the residual stream. FLOPs: 2 for each weight and token; attention's two
    products forward, five backward (Dao 2023), not halved for a causal mask.
    """
    stream, inner = itemsize * sequence * shape.width, itemsize * sequence * shape.inner
    sums = _FP32 * sequence * max(1, shape.width // _HEAD)
    everything = 8 * stream + 4 * inner + sums + 2 * _FP32 * sequence
    selective = 6 * stream + 2 * inner + sums  # the input, q, k, v, attention and its projection; gate and up
    product = 2.0 * sequence * shape.width * shape.inner
    dense, attention = 8.0 * sequence * shape.width**2 + 3 * product, 4.0 * sequence**2 * shape.width
    block = UnitCost(
        "blocks.0",
        "Block",
        True,
        dense + attention,
        2 * dense + 2.5 * attention,
        {"none": everything, "selective": selective, "full": stream, "host": 0.0},
        {"none": 0.0, "selective": 0.0} | dict.fromkeys(("full", "host"), dense + attention - product),
        2 * inner + 2 * stream,
    )
    head = 2.0 * sequence * shape.width * shape.vocabulary
    logits = _FP32 * sequence * shape.vocabulary
    ends = {"embed": ("Embedding", 0.0), "head": ("Linear", head)}
    nothing = dict.fromkeys(POLICIES, 0.0)
    first, last = (
        UnitCost(name, kind, False, flops, 2 * flops, nothing, nothing, 0.0) for name, (kind, flops) in ends.items()
    )
    blocks = (replace(block, name=f"blocks.{index}") for index in range(shape.layers))
    saved = logits + 2 * stream + _FP32 * sequence
    return ModelCost(
        (first, *blocks, last), saved + 2 * logits, saved, sequence, ("Activations and FLOPs are those of a formula.",)
    )
