"""The promise: the "cuda:0" that tests run on without a GPU keeps device and host apart, and computes as the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_emulation.build import build_device, compiler

TESTS = Path(__file__).resolve().parent.parent
PROGRAM = """
import torch
from torch import nn

def said(call):
    try:
        return str(call())
    except (RuntimeError, TypeError) as error:
        return str(error)

def losses(device):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Embedding(9, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)).to(device)
    optimizer, found = torch.optim.AdamW(net.parameters(), lr=0.1), []
    for step in range(3):
        loss = net(torch.arange(9, device=device)).logsumexp(-1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found

assert torch.cuda.is_available() and torch.cuda.device_count() == 1
here, there = torch.arange(6.0), torch.arange(6.0).cuda()
assert there.is_cuda and not here.is_cuda and str(there[2:].device) == "cuda:0" and str((there * 2).device) == "cuda:0"
assert there.cpu().equal(here) and there.view(2, 3).t().contiguous().tolist() == [[0, 3], [1, 4], [2, 5]]
assert "same device" in said(lambda: here + there), said(lambda: here + there)
assert "same device" in said(lambda: torch.cat([here, there]))
assert "can't convert cuda:0" in said(there.numpy)
torch.testing.assert_close(torch.tensor(losses("cuda")), torch.tensor(losses("cpu")))

storage, values = there.untyped_storage(), there.view(3, 2)
storage.resize_(0)
storage.resize_(4 * 6)
there.copy_(here)
assert values.tolist() == [[0, 1], [2, 3], [4, 5]], "views follow their storage"

begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
side = torch.cuda.Stream(priority=-1)
begin.record()
with torch.cuda.stream(side):
    assert torch.cuda.current_stream() is side
end.record()
assert torch.cuda.current_stream() is torch.cuda.default_stream() and end.query() and begin.elapsed_time(end) >= 0
"""


@pytest.mark.long
def test_what_lies_on_it_is_apart_and_comes_to_the_same_numbers(tmp_path: Path) -> None:
    if compiler() is None:
        pytest.skip("no C++ compiler")
    build_device(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(TESTS / "cuda_emulation" / "site"), "ZERO_STAND_IN": str(tmp_path)}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, timeout=300)
