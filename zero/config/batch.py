"""The three batch sizes: any two give the third; a contradiction is an error with a fix, never rounded."""

from typing import NamedTuple

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


class Batch(NamedTuple):
    """Samples per step over all ranks, samples per forward pass of one rank, passes per step."""

    train: int
    micro: int
    steps: int


def resolve(train: int | None, micro: int | None, steps: int | None, world: int) -> Batch:
    """Complete the triple for `world` ranks, or raise ValueError with the three values and the fix."""
    values = f"{_shown(TRAIN, train)}, {_shown(MICRO, micro)}, {_shown(STEPS, steps)}, world size {world}"
    if train is None and micro is None:
        raise ValueError(f"{values}: the batch size is missing; set {TRAIN} or {MICRO}")
    if train is None:
        return Batch(micro * (steps or 1) * world, micro, steps or 1)
    if micro is not None and steps is not None:
        if train != micro * steps * world:
            raise ValueError(f"{values}: {_contradiction(train, micro, steps, world)}")
        return Batch(train, micro, steps)
    if micro is not None:
        return Batch(train, micro, _divided(values, train, (MICRO, micro), world))
    return Batch(train, _divided(values, train, (STEPS, steps), world), steps or 1)


def tree_error(steps: int, world: int) -> str | None:
    """Why `world` ranks x `steps` micro-batches cannot be added as a binary tree; None if they can."""
    total = world * steps
    if total & (total - 1) == 0:  # then both factors are powers of two
        return None
    return (
        f"zero.reduce: 'tree' wants powers of two; got world size {world} x {STEPS}={steps} = {total} micro-batches "
        f"per optimizer step; change {'the number of ranks' if world & (world - 1) else STEPS}, or use 'ranks'"
    )


def _shown(name: str, value: int | None) -> str:
    return f"{name}={'(not given)' if value is None else value}"


def _divided(values: str, train: int, factor: tuple[str, int | None], world: int) -> int:
    """`train / (factor * world)`, which must be whole: rounding would train with another batch size."""
    name, count = factor
    per = (count or 1) * world
    if train % per == 0:
        return train // per
    product = f"world size {world}" if count is None else f"{count} x {world} = {per}"
    below = train // per * per
    sizes = f"{below} or {below + per}" if below else str(per)
    other = "" if count is None or train % world else f", or {name} to a divisor of {train // world}"
    raise ValueError(f"{values}: {train} is not a multiple of {product}; set {TRAIN} to {sizes}{other}")


def _contradiction(train: int, micro: int, steps: int, world: int) -> str:
    product = micro * steps * world
    text = f"{micro} x {steps} x {world} = {product}, not {train}; set {TRAIN} to {product}"
    if train % (micro * world) == 0:
        text += f", or {STEPS} to {train // (micro * world)}"
    if train % (steps * world) == 0:
        text += f", or {MICRO} to {train // (steps * world)}"
    return text
