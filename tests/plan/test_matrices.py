"""The promise: every element of a matrix is in one piece, and the ranks' shares of the work are near each other."""

from __future__ import annotations

import pytest

from zero.plan.layout import make_layout
from zero.plan.matrices import Matrix, assign, matrices_of, pieces


def test_what_is_a_matrix():
    assert matrices_of("w", (3, 5), {}, 1, 32) == [Matrix("w", 1, 32, 3, 5)]
    assert matrices_of("e", (2, 3, 5), {}, 0, 16) == [Matrix("e[0]", 0, 16, 3, 5), Matrix("e[1]", 0, 31, 3, 5)]
    assert matrices_of("filter", (4, 3, 2, 2), {}) == [Matrix("filter", 0, 0, 4, 12)]
    assert [one[2:] for one in matrices_of("qkv", (6, 2), {"*v": 3})] == [(0, 2, 2), (4, 2, 2), (8, 2, 2)]
    assert [one[2:] for one in matrices_of("qkv", (6, 2), {"*v": [4, 1, 1]})] == [(0, 4, 2), (8, 1, 2), (10, 1, 2)]
    assert len(matrices_of("gate_up", (3, 4, 2), {"w": 3, "gate*": 2})) == 6
    for shape, parts in (((5,), 1), ((5, 2), 2), ((6, 2), [4, 1])):
        with pytest.raises(ValueError, match=r"'w' (of|has)"):
            matrices_of("w", shape, {"w": parts})


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_shares_are_alike_and_of_names_only(ranks):
    shapes = [(256, 768), (256, 256), (1024, 256), (256, 1024)] * 24
    matrices = [Matrix(f"{index:03}", 0, 0, *shape) for index, shape in enumerate(shapes)]
    found = assign(matrices, ranks)
    loads = [sum(one.flops for one, rank in zip(matrices, found, strict=True) if rank == each) for each in range(ranks)]
    assert max(loads) <= 1.05 * sum(loads) / ranks
    backwards = dict(zip(matrices[::-1], assign(matrices[::-1], ranks), strict=True))
    assert [backwards[one] for one in matrices] == found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_pieces_are_all_elements_each_once(ranks):
    layouts = [make_layout({"a": 35, "b": 7, "c": 400}, ranks), make_layout({"d": 64}, ranks)]
    matrices = [Matrix("a", 0, 0, 5, 7), Matrix("c", 0, layouts[0].spans["c"].start, 20, 20), Matrix("d", 1, 0, 8, 8)]
    numels = [layout.numel // ranks for layout in layouts]
    found = pieces(matrices, numels, ranks)
    for index, matrix in enumerate(matrices):
        own = [piece for piece in found if piece.index == index]
        covered = [at for piece in own for at in range(piece.span.start, piece.span.stop)]
        assert covered == list(range(matrix.span.start, matrix.span.stop))
        for piece in own:
            assert piece.span.start // numels[matrix.unit] == piece.rank == (piece.span.stop - 1) // numels[matrix.unit]
