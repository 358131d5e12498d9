"""Checksums are those of zlib, on every instruction set, at any size, address and value, and without compiled code."""

from __future__ import annotations

import itertools
import random
import zlib
from pathlib import Path

import kernel_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import CPU, ISAS

from zero.kernels import crc32 as crc32_module
from zero.kernels.crc32 import crc32, crc32_read

isa = kernel_cases.isa

DATA = random.Random(7).randbytes((1 << 20) + 4096)
VIEW = memoryview(DATA)
# Around powers of two, and around what is folded at a time, 16, 64 and 256 bytes, after some of the larger blocks.
SIZES = sorted(
    {(1 << power) + d for power in range(9, 21) for d in (-1, 0, 1)}
    | {256 * wide + 64 * narrow + d for wide in (1, 2, 3) for narrow in range(5) for d in (-1, 0, 1, 15, 16, 17, 63)}
)


@pytest.fixture(params=["compiled", "zlib"])
def take(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test with the compiled kernel, and with what stands in for it."""
    if request.param == "zlib":
        monkeypatch.setattr(crc32_module, "load", lambda: None)
    return request.param


def test_sizes_and_starts(isa: str) -> None:
    small, around = itertools.product(range(301), (0, 1, 7, 15, 33)), itertools.product(SIZES, (0, 3))
    lines = itertools.product((1337,), range(65))  # every start within a cache line
    for size, start in itertools.chain(small, around, lines):
        span, value = VIEW[start : start + size], zlib.crc32(VIEW[:start], 0x89ABCDEF)
        assert crc32(span) == zlib.crc32(span), (size, start)
        assert crc32(span, value) == zlib.crc32(span, value), (size, start)
    assert crc32(b"123456789") == 0xCBF43926  # the check value that catalogues of CRCs give


@given(
    data=st.binary(max_size=2000), value=st.integers(0, 2**32 - 1), cut=st.integers(0, 2000), start=st.integers(0, 9)
)
@settings(max_examples=300, deadline=None)
def test_any_bytes_in_parts_and_whole(data: bytes, value: int, cut: int, start: int) -> None:
    shifted = memoryview(bytes(start) + data)[start:]
    try:
        for name in ISAS:
            if CPU is not None:
                CPU.set_isa(name)
            whole = crc32(shifted, value)
            assert whole == zlib.crc32(data, value)
            assert crc32(shifted[cut:], crc32(shifted[:cut], value)) == whole
    finally:
        if CPU is not None:
            CPU.set_isa("auto")


def in_chunks(data: bytes, chunk: int) -> list[int]:
    return [zlib.crc32(data[begin : begin + chunk]) for begin in range(0, len(data), chunk)]


@pytest.mark.parametrize(("size", "start", "at"), [(0, 0, 0), (1, 1, 1), (63, 0, 5), (131072, 3, 64), (262145, 7, 33)])
def test_reads_with_their_checksums(isa: str, take: str, tmp_path: Path, size: int, start: int, at: int) -> None:
    data = bytes(VIEW[:1000]) * 300
    (tmp_path / "bytes").write_bytes(data)
    with open(tmp_path / "bytes", "rb") as file:
        for chunk in (500, 4096, 131072, 2**40):
            target = bytearray(b"\x55" * (size + 200))
            found = crc32_read(file.fileno(), start, memoryview(target)[at : at + size], chunk)
            assert found == (size, in_chunks(data[start : start + size], chunk))
            assert target == b"\x55" * at + data[start : start + size] + b"\x55" * (200 - at)
        assert file.tell() == 0


def test_reads_up_to_the_end_of_a_file(take: str, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"0123456789")
    with open(tmp_path / "bytes", "rb") as file:
        target = bytearray(8)
        assert crc32_read(file.fileno(), 4, memoryview(target), 4) == (6, [zlib.crc32(b"4567"), zlib.crc32(b"89")])
        assert target == b"456789\0\0"
        assert crc32_read(file.fileno(), 10, memoryview(target), 4) == (0, [])


def test_tensors_of_any_dtype_and_shape(take: str) -> None:
    flat = torch.frombuffer(bytearray(DATA[:4801]), dtype=torch.uint8)
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.complex64]
    for dtype in [*dtypes, torch.bool, torch.float8_e4m3fn]:
        for start in (0, 1) if dtype.itemsize == 1 else (0, 16):
            raw = flat[start : start + 4768]
            wanted = zlib.crc32(raw.numpy())
            assert crc32(raw.view(dtype)) == wanted, dtype
            assert crc32(raw.view(dtype).view(2, -1)) == wanted, dtype
    assert crc32(torch.nn.Parameter(torch.ones(3))) == zlib.crc32(torch.ones(3).numpy())
    assert crc32(torch.tensor(1.0)) == zlib.crc32(torch.ones(1).numpy())
    assert crc32(torch.empty(0, 4)) == 0
