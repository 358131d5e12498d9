"""The promise: `zero verify` finds every byte that is not what was saved, and says where."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from checkpoint_files import checkpoint, flip

from zero.__main__ import main
from zero.checkpoint.index import CHUNK, Damaged, Index
from zero.checkpoint.safe_file import TensorChunk
from zero.checkpoint.verify import verify


def made(tmp_path: Path) -> Path:
    """Two ranks; `a` has two chunks and a bit on each of them."""
    generator = torch.Generator().manual_seed(2)
    half = (2 * CHUNK + 4096) // 4
    values = torch.randn(2 * half, generator=generator)
    own = [[TensorChunk("weight", "a", rank * half, (2, half), values[rank * half :][:half])] for rank in range(2)]
    own[0].append(TensorChunk("exp_avg", "a", 0, (2, half), values.clone()))
    own[1].append(TensorChunk("buffer", "seen", 0, (3,), torch.arange(3)))
    return checkpoint(tmp_path, own)


def test_every_flipped_bit_is_found(tmp_path):
    """At both ends of each tensor, on both sides of each border of a chunk, and in the header."""
    folder = made(tmp_path)
    assert verify(folder) == []
    for path in sorted(folder.glob("*.safetensors")):
        whole = path.read_bytes()
        begin = 8 + int.from_bytes(whole[:8], "little")
        inside = [begin, begin + CHUNK - 1, begin + CHUNK, len(whole) - 1]
        places = [place for place in inside if begin <= place < len(whole)]
        for place in [*places, 0, 9]:
            flip(path, place)
            found = verify(folder)
            assert found, f"byte {place} of {path.name}"
            assert all(path.name in problem for problem in found)
            if place >= begin:
                assert len(found) == 1
                what = "exp_avg of 'a'" if "moments" in path.name else "weight of 'a'"
                assert found[0].startswith((what, "buffer 'seen'"))
            path.write_bytes(whole)
    assert verify(folder) == []


def test_every_flipped_bit_of_a_header_is_found(tmp_path):
    """Its length, its JSON, and some of the spaces behind it, though all tensors are read by the index."""
    own = [
        TensorChunk("weight", "a", 0, (2, 2), torch.ones(2, 2)),
        TensorChunk("buffer", "n", 0, (3,), torch.arange(3)),
    ]
    folder = checkpoint(tmp_path, [own])
    (path,) = folder.glob("*.safetensors")
    whole = path.read_bytes()
    text = whole[8 : 8 + int.from_bytes(whole[:8], "little")].rstrip()
    with path.open("r+b", buffering=0) as file:
        for bit in [*range(8 * (8 + len(text))), *range(8 * (8 + len(text)), 8 * 4096, 1001)]:
            place = bit // 8
            os.pwrite(file.fileno(), bytes([whole[place] ^ 1 << bit % 8]), place)
            (found,) = verify(folder)
            assert path.name in found, f"bit {bit % 8} of byte {place}"
            os.pwrite(file.fileno(), whole[place : place + 1], place)
    assert verify(folder) == []
    path.write_bytes(whole.replace(b'"n"', b'"m"'))
    assert verify(folder) == [f"the header of {path.name} has nothing as 'n', not int64 [3] from byte 4096 on"]


def test_every_flipped_bit_of_the_index_is_found(tmp_path):
    whole = (made(tmp_path) / "index.json").read_bytes()
    wanted = Index.of_json(whole, "it")
    for place in range(8 * len(whole)):
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        try:
            found = Index.of_json(bytes(data), "it")
        except Damaged:
            continue
        assert found == wanted, f"bit {place % 8} of byte {place // 8}"  # where the word for the checksum is hit


def test_all_problems_are_listed(tmp_path, capsys):
    folder = made(tmp_path)
    one, two = sorted(folder.glob("weights-*"))
    moments = next(folder.glob("moments-*"))
    for place in (-1, -2 * CHUNK, -3 * CHUNK):
        flip(moments, place)
    one.write_bytes(one.read_bytes()[:-4])
    two.unlink()
    (folder / "weights-00000-of-00002.deadbeef.safetensors").write_bytes(b"left by a kill")
    found = verify(folder)
    assert [problem for problem in found if f"{one.name} has " in problem]
    assert [problem for problem in found if f"{one.name} ends at byte" in problem]
    assert f"{two.name} is missing" in found
    assert [problem for problem in found if problem.startswith("exp_avg of 'a'") and "so are 2 MiB" in problem]
    assert len(found) == 4
    assert main(["verify", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert all(problem in said for problem in found)
    assert "deadbeef.safetensors: belongs to no checkpoint" in said


def test_all_tags(tmp_path, capsys):
    good = made(tmp_path)
    own = [[TensorChunk("weight", "a", 0, (4,), torch.zeros(4))]]
    bad = checkpoint(tmp_path, own, tag="later")
    flip(next(bad.glob("weights*")), -1)
    assert main(["verify", str(tmp_path), "--tag", "global_step3"]) == 0
    assert main(["verify", str(tmp_path)]) == 1  # latest
    assert main(["verify", str(tmp_path), "--all"]) == 1
    said = capsys.readouterr().out
    assert f"{good}: whole" in said
    assert f"{bad}: weight of 'a'" in said
    (bad / "index.json").unlink()
    (good / ".index.json.7.partial").write_text("{")  # is no error
    assert main(["verify", str(good)]) == 0
    assert ".index.json.7.partial: belongs to no checkpoint" in capsys.readouterr().out
    assert "holds no whole checkpoint" in verify(bad)[0]
    assert main(["verify", str(tmp_path), "--all", "--tag", "later"]) == 2
    assert main(["verify", str(tmp_path / "global_step3"), "--all"]) == 2
