"""The promise: plain values and tensors come back from JSON exactly, and whatever else is refused by its path."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from zero.checkpoint.plain_values import DEEPEST, decode, encode


def through_json(value: Any) -> Any:
    made, tensors = encode(value, "value")
    assert all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors.values())
    return decode(json.loads(json.dumps(made, allow_nan=False)), tensors)


def same(a: Any, b: Any) -> bool:
    """Equal in type, bits, and order of what has one."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        as_bytes = [x.reshape(-1).view(torch.uint8) if x.numel() else x.reshape(-1) for x in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return math.copysign(1, a) == math.copysign(1, b) and (a == b or (math.isnan(a) and math.isnan(b)))
    if isinstance(a, dict):
        keys = zip(a, b, strict=True)
        return len(a) == len(b) and all(same(k, m) for k, m in keys) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6)
KEYS = st.recursive(
    SCALARS | st.sampled_from(["$tuple", "$dict", "$tensor", "$float", "$nonsense", "$"]),
    lambda inner: st.lists(inner, max_size=2).map(tuple) | st.frozensets(inner, max_size=2),
    max_leaves=3,
)
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
]
SHAPES = st.lists(st.integers(0, 3), max_size=3)


def bits(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    """A tensor of any bits, NaN among them."""
    numel = math.prod(shape)
    if dtype is torch.bool:
        return torch.arange(numel).reshape(shape) % 2 == seed % 2
    nbytes = numel * torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(dtype).reshape(shape) if numel else torch.empty(shape, dtype=dtype)


TENSORS = st.builds(bits, st.sampled_from(DTYPES), SHAPES, st.integers(0, 9))
ARRAYS = st.builds(
    lambda code, shape, seed: bits(torch.uint8, [*shape, 16], seed).numpy().copy().view(code),
    st.sampled_from(["<f8", ">f4", "<u4", "|i1", "<c16", "<i2"]),
    SHAPES,
    st.integers(0, 9),
)
LEAVES = st.one_of(
    SCALARS,
    st.just(float("nan")),
    TENSORS,
    ARRAYS,
    st.sampled_from([np.float64(-0.0), np.float32("nan"), np.int8(-3), np.bool_(True), np.str_("ä"), np.str_("")]),
    st.sampled_from([torch.float32, torch.int8, torch.device("cuda", 1), torch.device("cpu"), torch.Size([2, 0])]),
    st.sets(KEYS, max_size=3),
    st.frozensets(KEYS, max_size=3),
)


def containers(inner: st.SearchStrategy) -> st.SearchStrategy:
    items, mappings = st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)
    return st.one_of(items, items.map(tuple), mappings, mappings.map(OrderedDict), mappings.map(Counter))


@settings(deadline=None, max_examples=150)
@given(value=st.recursive(LEAVES, containers, max_leaves=12))
def test_values_come_back_as_they_were(value):
    assert same(through_json(value), value)


def test_tensors_are_copies_without_a_graph_and_one_where_they_are_one():
    weight = nn.Parameter(torch.ones(3, 2))
    made, tensors = encode({"a": weight, "b": [weight], "c": weight.t()}, "state")
    assert list(tensors) == ["state/0", "state/1"]
    with torch.no_grad():
        weight.zero_()
    found = decode(made, tensors)
    assert found["a"] is found["b"][0] and not found["a"].requires_grad
    assert torch.equal(found["a"], torch.ones(3, 2)) and torch.equal(found["c"], torch.ones(2, 3))


class Thing:
    def __repr__(self) -> str:
        return "Thing"


Pair = namedtuple("Pair", "a b")


def test_all_that_is_not_plain_is_named_at_once():
    def fn() -> None: ...

    plain, key = "; wanted JSON values and tensors", "; wanted text, numbers, or tuples of these"
    cases = {
        f"['model']['fn']: got a function{plain}": ("model", {"fn": fn, "ok": 1}),
        f"['list'][1]: got a Thing{plain}": ("list", [1, Thing()]),
        f"['pair'][0]: got a Pair{plain}": ("pair", (Pair(1, 2),)),
        f": key Thing: got a Thing{key}": (Thing(), 1),
        f"['nan']: key nan: got NaN{key}": ("nan", {float("nan"): 1}),
        f"['set']: element Thing: got a Thing{key}": ("set", {Thing()}),
        f"['class']: got the class Thing{plain}": ("class", Thing),
        f"['default']: got a defaultdict{plain}": ("default", defaultdict(list)),
        f"['bytes']: got a bytes{plain}": ("bytes", b"x"),
        f"['sparse']: got a sparse_coo tensor{plain}": ("sparse", torch.ones(2).to_sparse()),
        f"['meta']: got a meta tensor{plain}": ("meta", torch.ones(2, device="meta")),
        f"['objects']: got a NumPy ndarray of dtype object{plain}": ("objects", np.array([None])),
    }
    with pytest.raises(ValueError) as error:
        encode(dict(cases.values()), "state")
    assert sorted(str(error.value).splitlines()) == sorted(f"state{wanted}" for wanted in cases)


def test_what_contains_itself_is_refused_and_what_stands_twice_is_not():
    loop: dict[str, Any] = {"a": []}
    loop["a"].append(loop)
    with pytest.raises(ValueError, match=re.escape("x['a'][0]: got a dict that contains itself")):
        encode(loop, "x")
    twice = [1]
    assert through_json([twice, twice]) == [[1], [1]]
    deep: list = []
    for _ in range(DEEPEST + 1):
        deep = [deep]
    with pytest.raises(ValueError, match=f"more than {DEEPEST} containers inside each other"):
        encode(deep, "x")
    assert through_json(deep[0][0]) == deep[0][0]
