"""The pool of ranks that tests use: a rank that is done leaves its group when all are, a rank that failed at once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import Pool, RankError


def nothing() -> int:
    return dist.get_rank()


def fails_alone() -> None:
    if dist.get_rank() == 1:
        raise ValueError("so says rank 1")
    dist.all_reduce(torch.ones(1))


@pytest.mark.long
def test_a_rank_that_connects_late_finds_the_others(pool: Pool) -> None:
    for _ in range(8):
        assert pool.run(3, nothing) == [0, 1, 2]


@pytest.mark.long
def test_a_rank_that_fails_is_not_waited_for() -> None:
    pool = Pool(2)
    try:
        with pytest.raises(RankError, match="ValueError: so says rank 1") as error:
            pool.run(2, fails_alone)
        assert "gave no answer" not in str(error.value)
    finally:
        pool.close()
