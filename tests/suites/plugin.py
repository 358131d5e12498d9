"""A plugin of pytest for the libraries' own tests: marks for GPUs are off where there is none."""

from __future__ import annotations

import unittest
from typing import Any

import accelerate.test_utils.testing as accelerate_marks
import torch
import transformers.testing_utils as transformers_marks
from outcomes import pytest_runtest_logreport as pytest_runtest_logreport

_FOR_GPUS = {
    accelerate_marks: ("require_non_cpu", "require_multi_device"),
    transformers_marks: ("require_torch_accelerator", "require_torch_multi_accelerator"),
}
# What is skipped for DeepSpeed's sake, and must pass with zero.
_OTHERS_FAIL = ("hf_optim + hf_scheduler resumes with the correct states but slowly diverges",)


def _as_it_is(case: Any) -> Any:
    return case


def _skip(test: unittest.TestCase, reason: str) -> None:
    if reason not in _OTHERS_FAIL:
        raise unittest.SkipTest(reason)


def pytest_configure() -> None:
    """Before any test file is imported: its decorators are looked up then. Ranks are two processes of this machine."""
    unittest.TestCase.skipTest = _skip
    if torch.cuda.is_available():
        return
    for module, names in _FOR_GPUS.items():
        for name in names:
            getattr(module, name)  # an AttributeError here: the library has it no longer
            setattr(module, name, _as_it_is)
    transformers_marks.backend_device_count = lambda device: 2
