"""Which compiled kernels run, what happens without them, and that they keep to their arrays under sanitizers."""

import functools
import logging
import subprocess
import sys
from pathlib import Path

import kernel_cases
import pytest
import torch
from kernel_cases import CPU, all_same, numbers

from zero.kernels import cuda, native, norm
from zero.kernels import step as step_module
from zero.kernels.formulas import Adam
from zero.kernels.moments import Moment

isa = kernel_cases.isa

SANITIZE = Path(__file__).parents[2] / "csrc" / "tests" / "sanitize.py"
SKIPPED = 77  # of that script: this compiler has no sanitizers
NAMES = ("scalar", "sse2", "neon", "avx2", "avx512")


@pytest.mark.skipif(CPU is None, reason=str(native.missing_text()))
def test_instruction_sets(isa):
    runnable, compiled = CPU.isas(), CPU.compiled_isas()
    assert runnable[0] == compiled[0] == "scalar"
    assert set(runnable) <= set(compiled) <= set(NAMES)
    assert native.isa() == isa
    CPU.set_isa("auto")
    assert native.isa() == runnable[-1]
    with pytest.raises(ValueError, match=r"instruction set 'sse9' cannot run here.*scalar"):
        CPU.set_isa("sse9")


def test_without_compiled_kernels_it_says_so_once_and_gives_the_same(monkeypatch, caplog):
    def run():
        master, param = numbers(1003), torch.zeros(1003, dtype=torch.bfloat16)
        moments = (Moment.filled(1003, "8bit"), Moment.filled(1003, "8bit", signed=False))
        for t in (1, 2, 3):
            step_module.step(Adam(1e-3), master, moments, numbers(1003, seed=t), param, step=t, grad_scale=0.5)
        return [master, param, *(tensor for m in moments for tensor in (m.values, m.scales))]

    compiled = run()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "zero._cpu", None)  # makes the import fail
        for cached in (native._find, native.load):
            patch.setattr(native, cached.__name__, functools.cache(cached.__wrapped__))
        for module in (step_module, norm):
            patch.setattr(module, "load", native.load)
        with caplog.at_level(logging.WARNING, logger="zero"):
            plain = run()
            assert norm.sum_squares(torch.ones(3)) == 3.0
        assert native.isa() == "torch"
        assert "zero._cpu" in native.missing_text()
    assert [record.name for record in caplog.records] == ["zero"]
    assert "compiled CPU kernels are missing" in caplog.text
    all_same(plain, compiled)


def test_missing_cuda_kernels_are_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "zero._cuda", None)  # makes the import fail
    for cached in (native._find, native.load):
        monkeypatch.setattr(native, cached.__name__, functools.cache(cached.__wrapped__))
    monkeypatch.setattr(cuda, "load", native.load)
    monkeypatch.setattr(cuda, "_usable", functools.cache(cuda._usable.__wrapped__))
    with caplog.at_level(logging.WARNING, logger="zero"):
        assert not cuda.kernels(torch.device("cpu"))
        assert not caplog.records
        for index in (0, 1, 0):
            assert not cuda.kernels(torch.device("cuda", index))
    assert [record.name for record in caplog.records] == ["zero"]
    assert "CUDA kernels are missing" in caplog.text and "ZERO_REQUIRE_CUDA=1" in caplog.text
    assert "zero._cuda" in str(native.missing_text(native.CUDA_MODULE))


@pytest.mark.long
def test_kernels_stay_in_their_arrays_and_agree_with_the_scalar_ones(tmp_path: Path) -> None:
    command = [sys.executable, str(SANITIZE), "--out", str(tmp_path)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False
    )
    if done.returncode == SKIPPED:
        pytest.skip(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert "scalar" in next(line for line in lines if line.startswith("instruction sets that run here"))
    assert lines[-1].startswith("ok: ")
