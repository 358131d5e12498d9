"""The table of the suites: what fails must be known, what is known must fail; a run without tests is no success."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import run_suites

REASON = {"Names::test_file_*": "other names of files"}
FAILED, PASSED = ("failed", "AssertionError: 1 != 2"), ("passed", "")


@pytest.mark.parametrize(
    ("outcomes", "fine", "line"),
    [
        ({"Names::test_file_a": FAILED, "test_b": PASSED}, True, "known: Names::test_file_a: other names of files"),
        ({"Names::test_file_a": FAILED, "test_b": FAILED}, False, "failed: test_b: AssertionError: 1 != 2"),
        ({"Names::test_file_a": PASSED}, False, "passed, take it out of known.json: Names::test_file_a"),
        ({"test_b": PASSED}, False, "in known.json, but not there: Names::test_file_*"),
    ],
)
def test_what_fails_must_be_known_and_what_is_known_must_fail(outcomes, fine, line):
    counts, lines, verdict = run_suites.judge(outcomes, REASON)
    assert (verdict, line in lines, sum(counts.values())) == (fine, True, len(outcomes))


def test_a_failure_of_a_known_kind_is_known_and_what_passes_is_not_asked():
    outcomes = {"test_a": FAILED, "test_b": PASSED, "test_c": ("failed", "AttributeError: 'x' has no attribute 'y'")}
    counts, lines, fine = run_suites.judge(outcomes, {}, {"*no attribute 'y'*": "asks for insides"})
    assert (counts, fine) == ({"passed": 1, "known": 1, "failed": 1, "skipped": 0}, False)
    assert "known: test_c: asks for insides" in lines


def test_a_run_without_a_test_is_no_success():
    assert run_suites.judge({}, {}) == ({"passed": 0, "known": 0, "failed": 0, "skipped": 0}, [], False)


def test_of_two_outcomes_of_a_test_the_worse_counts(tmp_path: Path):
    file = tmp_path / "outcomes.jsonl"
    cases = [("a", "passed", ""), ("b", "skipped", "no GPU"), ("a", "failed", "tear down\nmore")]
    file.write_text(
        "".join(json.dumps(dict(zip(("test", "outcome", "why"), case, strict=True))) + "\n" for case in cases)
    )
    assert run_suites.read(file) == {"a": ("failed", "tear down"), "b": ("skipped", "no GPU")}


def test_a_folder_without_trees_is_told(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert run_suites.main([str(tmp_path)]) == 2
    assert "accelerate or transformers or DeepSpeed" in capsys.readouterr().err


SUITE = """
import unittest
import torch
from accelerate.test_utils.testing import require_multi_device
from parameterized import parameterized

class Case(unittest.TestCase):
    @require_multi_device
    def test_finds_zero(self):
        import deepspeed
        from accelerate.utils import is_deepspeed_available
        assert is_deepspeed_available() and "zero" in deepspeed.__version__

    def test_fails(self):
        self.assertEqual(1, 2)

    @parameterized.expand(["no GPU", "hf_optim + hf_scheduler resumes with the correct states but slowly diverges"])
    def test_skips(self, reason):
        self.skipTest(reason)

class TestDeepSpeedModelZoo(unittest.TestCase):
    def test_needs_scripts(self):
        raise OSError
"""


@pytest.mark.long
def test_a_suite_runs_with_zero_as_deepspeed_and_is_counted(tmp_path: Path):
    for library in ("accelerate", "parameterized"):
        pytest.importorskip(library)
    (tmp_path / "test_suite.py").write_text(SUITE)
    outcomes, notes, whole = run_suites.run(tmp_path, "test_suite.py", tmp_path)
    assert whole and notes == ["left out, as the tree has no examples/pytorch: TestDeepSpeedModelZoo"]
    assert {test: outcome for test, (outcome, _) in outcomes.items()} == {
        "Case::test_finds_zero": "passed",
        "Case::test_fails": "failed",
        "Case::test_skips_0_no_GPU": "skipped",
        "Case::test_skips_1_hf_optim_hf_scheduler_resumes_with_the_correct_states_but_slowly_diverges": "passed",
    }
    assert outcomes["Case::test_skips_0_no_GPU"][1] == "Skipped: no GPU"


HARNESS = """
import pytest

class DistributedExec:
    def __call__(self, ranks):
        self._launch_procs(ranks, "file:///nowhere")

    def _dist_run(self, rank, ranks, port, init_method):
        import deepspeed
        assert "zero" in deepspeed.__version__
        try:
            return self.run(rank)
        except pytest.skip.Exception as skipped:
            return skipped.msg

def get_master_port():
    return "29500"
"""
OF_DEEPSPEED = """
import os
import time
import pytest
import torch
import torch.distributed as dist
from unit.common import DistributedExec

class One(DistributedExec):
    def __init__(self, kind):
        self.kind = kind

    def run(self, rank):
        if self.kind == "waits":
            if rank == 0:
                raise ValueError("rank 0 leaves")
            time.sleep(600)
        if self.kind == "dies":
            os._exit(3)
        if self.kind == "skips":
            pytest.skip("no GPU")
        if self.kind == "zero can":
            pytest.skip("CPU accelerator does not support this test yet.")
        if self.kind == "compares":
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1), device_ids=["cpu"], output_device="cpu")
            dist.all_gather_into_tensor(torch.zeros(1), torch.ones(()))

@pytest.mark.parametrize("kind", ["passes", "waits", "dies", "skips", "zero can", "compares"])
def test_of(kind):
    One(kind)(2)
"""


@pytest.mark.long
def test_ranks_of_deepspeeds_tests_end_also_where_one_waits_for_another_in_vain(tmp_path: Path):
    tree = tmp_path / "DeepSpeed"
    (tree / "tests" / "unit").mkdir(parents=True)
    (tree / "deepspeed.py").write_text("raise RuntimeError('its own sources were imported')")
    (tree / "tests" / "conftest.py").write_text(
        "import sys, pathlib; sys.path.insert(1, str(pathlib.Path(__file__).parents[1]))"
    )
    (tree / "tests" / "unit" / "__init__.py").write_text("")
    (tree / "tests" / "unit" / "common.py").write_text(HARNESS)
    (tree / "tests" / "unit" / "test_some.py").write_text(OF_DEEPSPEED)
    outcomes, notes, whole = run_suites.run(tree, "tests/unit/test_some.py", tmp_path / "out")
    assert whole and not notes
    assert {test: (outcome, why.removeprefix("Failed: ")) for test, (outcome, why) in outcomes.items()} == {
        "test_of[passes]": PASSED,
        "test_of[waits]": ("failed", "rank 0: ValueError: rank 0 leaves"),
        "test_of[dies]": ("failed", "rank 0: ended with status 3"),
        "test_of[skips]": ("skipped", "Skipped: no GPU"),
        "test_of[zero can]": PASSED,
        "test_of[compares]": PASSED,
    }
