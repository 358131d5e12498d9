"""How far a learning rate is between its bounds: the formulas of the schedules, as plain functions of the iteration."""

from __future__ import annotations

import math


def warmup_gamma(iteration: int, warmup_num_steps: int, warmup_type: str = "log") -> float:
    """Return how much of the way from min to max a warm-up has gone: 0 up to iteration 0, 1 from its end on.

    `warmup_num_steps` is at least 2, because log(1) is 0; the classes below see to that.
    """
    if iteration < 0:
        return 0.0
    if iteration >= warmup_num_steps:
        return 1.0
    if warmup_type == "log":
        return math.log(iteration + 1) / math.log(warmup_num_steps)
    return iteration / warmup_num_steps


def linear_decay(iteration: int, total_num_steps: int, warmup_num_steps: int) -> float:
    """Return the factor of the straight line after a warm-up: 1 at its end, 0 from `total_num_steps` on."""
    return max(0.0, (total_num_steps - iteration) / max(1, total_num_steps - warmup_num_steps))


def cosine_decay(iteration: int, total_num_steps: int, warmup_num_steps: int, cos_min_ratio: float) -> float:
    """Return the factor of the half cosine that follows a warm-up: from just under 1 down to `cos_min_ratio`.

    The last iteration of a run, `total_num_steps - 1`, is at the floor, and the factor stays there.
    """
    progress = (iteration - warmup_num_steps + 1) / max(1, total_num_steps - warmup_num_steps)
    height = (1 + math.cos(math.pi * min(1.0, progress))) / 2
    return max(0.0, cos_min_ratio + (1 - cos_min_ratio) * height)


def cycle_height(iteration: int, first: int, second: int, first_stairs: int = 0, second_stairs: int = 0) -> float:
    """Return the height, 0 to 1, in a triangle that begins at iteration -1, rises in `first` and falls in `second`.

    With stairs it is the height of the stair, which is never above the line.
    """
    position = (iteration + 1) % (first + second)
    steps, size, stairs = (
        (position, first, first_stairs) if position <= first else (first + second - position, second, second_stairs)
    )
    return steps * stairs // size / stairs if stairs > 0 else steps / size


def decay_factor(count: float, step_size: float, rate: float) -> float:
    """Return `1 + rate * count / step_size`, `count` being iterations; 1 if either is 0."""
    return 1.0 if step_size == 0 or rate == 0 else 1 + rate * count / step_size


def range_test_factor(iteration: int, step_size: int, step_rate: float, staircase: bool) -> float:
    """Return the factor of a range test: it grows by `step_rate` every `step_size`, steadily or in stairs."""
    interval = (iteration + 1) / step_size
    return 1 + step_rate * (math.floor(interval) if staircase else interval)
