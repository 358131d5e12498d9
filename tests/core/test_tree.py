"""The promise: the order of a sum in a tree is a function of positions, however ranks and micro-batches share them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero.core.tree import Tree


def joined(left: str, right: str) -> str:
    return f"({left}+{right})"


def summed(leaves: dict[int, str]) -> str | None:
    tree: Tree[str] = Tree(joined)
    for position in sorted(leaves):
        tree.put(position, leaves[position])
    return tree.take()


def balanced(leaves: dict[int, str], first: int, size: int) -> str | None:
    """The definition: halves of a power of two of positions; an empty half counts as nothing."""
    if size == 1:
        return leaves.get(first)
    left, right = balanced(leaves, first, size // 2), balanced(leaves, first + size // 2, size // 2)
    return joined(left, right) if left and right else left or right


def test_four_leaves():
    assert summed({position: str(position) for position in range(4)}) == "((0+1)+(2+3))"
    assert summed({position: str(position) for position in range(6)}) == "(((0+1)+(2+3))+(4+5))"
    assert summed({}) is None


@settings(deadline=None)
@given(st.sets(st.integers(0, 63)))
def test_the_order_is_that_of_a_balanced_tree_with_gaps(positions):
    leaves = {position: str(position) for position in positions}
    assert summed(leaves) == balanced(leaves, 0, 64)


@settings(deadline=None)
@given(micro_batches=st.integers(1, 40), log_world=st.integers(0, 5), gaps=st.sets(st.integers(0, 39)))
def test_rows_of_ranks_and_micro_batches_make_one_tree(micro_batches, log_world, gaps):
    """World W with A micro-batches is world 1 with A x W; a window that ended early is shorter for all alike."""
    world = 1 << log_world
    whole = {s: str(s) for s in range(micro_batches * world) if s // world not in gaps}
    upper: dict[int, str] = {}
    for micro_batch in set(range(micro_batches)) - gaps:
        rows = [str(micro_batch * world + rank) for rank in range(world)]
        upper[micro_batch] = summed(dict(enumerate(rows)))
    assert summed(upper) == summed(whole)


@settings(deadline=None)
@given(st.lists(st.integers(0, 200), unique=True, min_size=1).map(sorted))
def test_as_many_sums_are_kept_as_there_are_open_subtrees(positions):
    tree: Tree[int] = Tree(int.__add__)
    for position in positions:
        tree.put(position, 1)
        assert len(tree) == len(tree.values) <= (position + 1).bit_length()
        assert sum(tree.values) == positions.index(position) + 1
    assert tree.take() == len(positions)
    assert len(tree) == 0


@pytest.mark.parametrize("position", [3, 2, -1])
def test_positions_rise(position):
    tree: Tree[int] = Tree(int.__add__)
    tree.put(3, 1)
    with pytest.raises(ValueError, match=re.escape(f"position: got {position}; wanted one behind 3")):
        tree.put(position, 1)
