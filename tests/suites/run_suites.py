"""Runs what Accelerate, Transformers and DeepSpeed test of DeepSpeed over zero: `make suites SUITES=FOLDER`.

FOLDER has the trees `accelerate`, `transformers` and `DeepSpeed`, or some of them, as their repositories have them, of
about the versions that are installed; they are no part of this repository. A tree's own sources are used where it has
some, else the installed library; of DeepSpeed its tests alone. One process of pytest for each file, on CPU ranks where
there is no GPU. known.json has the tests that fail, each with its reason. The exit status is 1 if another one fails, or
if one of those passes or is gone.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from zero.launch.as_deepspeed import variables

SUITES = {
    "accelerate": (
        "tests/deepspeed/test_deepspeed.py",
        "tests/deepspeed/test_deepspeed_gradient_accumulation.py",
        "tests/deepspeed/test_deepspeed_multiple_model.py",
        "tests/deepspeed/test_alst_ulysses_sp.py",
    ),
    "transformers": ("tests/trainer/distributed/test_trainer_distributed_deepspeed.py",),
    # Left out: schedules, inference, kernels and their optimizers' own steps,
    # DeepSpeed's compiler passes, sparse and 1-bit gradients, autotuning, and what asks for its insides by name. Other
    # files that collect have not been looked through (v1/zero/test_zero, ds_initialize, no_sync_ctxt, fp16), or compare
    # bf16 that adds up in fp32 with plain bf16 (zero_user_backward): docs/huggingface.md says how that one was read.
    "DeepSpeed": tuple(
        f"tests/unit/{folder}/test_{name}.py"
        for folder, names in {
            "checkpoint": "convert_checkpoint latest_checkpoint moe_checkpoint pipeline shared_weights "
            "tag_validation zero_optimizer",
            "comm": "dist",
            "model_parallelism": "autotp_training tp_plan_e2e tp_plan_real_models",
            "pipe": "pipe_module",
            "runtime": "data lr_schedulers multi_output_model",
            "runtime/half_precision": "zero_optim_overflow",
            "runtime/pipe": "pipe topology",
            "runtime/zero": "ignore_unused_parameters zero_config zero_context_ancestry zero_context_return "
            "zero_dynamic_class zero_nesting_init",
            "ulysses_alst": "ulysses_sp_hf",
            "v1/moe": "moe",
            "v1/zero": "zero2_offload_multi_backward zero_coalesce_grad_reduction zero_hook_count_regression "
            "zero_torch_func",
        }.items()
        for name in names.split()
    ),
}
PLUGINS = {"DeepSpeed": "of_deepspeed"}  # of a tree; the others have plugin.py
NEEDS = {"TestDeepSpeedModelZoo": "examples/pytorch"}  # class -> folder of the tree without which it is left out
PATIENCE = 3600  # seconds for one file
_HERE = Path(__file__).resolve().parent
_OUTCOMES = ("passed", "skipped", "failed")  # the worst comes last


def judge(
    outcomes: Mapping[str, tuple[str, str]], known: Mapping[str, str], kinds: Mapping[str, str] | None = None
) -> tuple[dict[str, int], list[str], bool]:
    """Counts, a line for each test that did not pass, and whether all is as known.

    outcomes: test -> (one of _OUTCOMES, why); known: pattern of tests -> reason; kinds: pattern of why -> reason.
    """
    counts, lines, fine = dict.fromkeys(("passed", "known", "failed", "skipped"), 0), [], bool(outcomes)
    for test, (outcome, why) in sorted(outcomes.items()):
        reason = next((text for pattern, text in known.items() if fnmatch.fnmatchcase(test, pattern)), None)
        if outcome == "failed" and not reason:
            reason = next((text for kind, text in (kinds or {}).items() if fnmatch.fnmatchcase(why, kind)), None)
        if outcome == "failed" and reason:
            outcome, why = "known", reason
        elif outcome == "failed" or (outcome == "passed" and reason):
            fine = False
        counts[outcome] += 1
        if outcome != "passed":
            lines.append(f"{outcome}: {test}: {why}")
        elif reason:
            lines.append(f"passed, take it out of known.json: {test}")
    gone = [pattern for pattern in known if not fnmatch.filter(outcomes, pattern)]
    return counts, [*lines, *(f"in known.json, but not there: {pattern}" for pattern in gone)], fine and not gone


def read(file: Path) -> dict[str, tuple[str, str]]:
    """The outcomes that plugin.py has written: test -> (outcome, first line of why); the worst where there are two."""
    outcomes: dict[str, tuple[str, str]] = {}
    for case in map(json.loads, file.read_text().splitlines() if file.exists() else []):
        found = case["outcome"], case["why"].strip().partition("\n")[0][:200]
        before = outcomes.get(case["test"], ("passed", ""))
        outcomes[case["test"]] = max(before, found, key=lambda each: _OUTCOMES.index(each[0]))
    return outcomes


def run(tree: Path, file: str, out: Path) -> tuple[dict[str, tuple[str, str]], list[str], bool]:
    """Run one file of a tree: its outcomes, notes, and whether it came to its end.

    DeepSpeed's are copied to a folder of their own: they put what lies beside them first on the path.
    """
    if alone := tree.name in PLUGINS:
        shutil.copytree(tree / "tests", out / tree.name / "tests", dirs_exist_ok=True)
        tree = out / tree.name
    folder = tree / "tests" if alone else tree
    outcomes = out / "-".join((tree.name, *Path(file).with_suffix(".jsonl").parts[1:]))
    outcomes.unlink(missing_ok=True)
    door = variables(os.environ)
    # Some of Accelerate's scripts look for files of its tests beside its sources.
    sources = [str(tree / "src")] if (tree / "src" / tree.name / "__init__.py").exists() else []
    environment = {
        **os.environ,
        **door,
        # zero's own place is named, as DeepSpeed has folders of tests that are called zero.
        "PYTHONPATH": os.pathsep.join(
            [door["PYTHONPATH"], *map(str, (_HERE.parents[1], _HERE, _HERE / "stand_ins")), *sources]
        ),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), door["PATH"]]),
        "ZERO_SUITES_OUTCOMES": str(outcomes),
        "HF_HOME": str(out / "hub"),
        "HF_HUB_OFFLINE": "1",
        "RUN_SLOW": "1",
        "OMP_NUM_THREADS": "1",
    }
    without = [
        name for name, folder in NEEDS.items() if name in (tree / file).read_text() and not (tree / folder).exists()
    ]
    notes = [f"left out, as the tree has no {NEEDS[name]}: {name}" for name in without]
    chosen = " and ".join(f"not {name}" for name in without)
    words = ["-p", PLUGINS.get(tree.name, "plugin"), "-p", "no:cacheprovider", "-q", "-k", chosen, str(tree / file)]
    with open(outcomes.with_suffix(".log"), "w") as log:
        command = [sys.executable, "-m", "pytest", *words]
        suite = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = suite.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(suite.pid, signal.SIGKILL)
            status = suite.wait()
            notes.append(f"ended after {PATIENCE} s")
    if whole := status in (0, 1):
        return read(outcomes), notes, whole
    return read(outcomes), [*notes, f"pytest's exit status was {status}; see {log.name}"], whole


def main(arguments: list[str]) -> int:
    """Run what is at hand and print the table."""
    root = Path(*arguments[:1]).resolve()
    trees = [root / name for name in SUITES if arguments and (root / name).is_dir()]
    if not trees:
        print(
            f"SUITES: got {arguments}, wanted a folder with {' or '.join(SUITES)}, their source trees", file=sys.stderr
        )
        return 2
    out = Path("out/suites").resolve()
    out.mkdir(parents=True, exist_ok=True)
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(out / "hub")}
    subprocess.run([sys.executable, str(_HERE / "hub.py"), str(out / "hub")], env=offline, check=True)
    known = json.loads((_HERE / "known.json").read_text())
    table, details, good = [("", "passed", "known", "failed", "skipped")], [], True
    for tree in trees:
        for file in SUITES[tree.name]:
            name = f"{tree.name}/{file}"
            outcomes, notes, whole = run(tree, file, out)
            counts, lines, fine = judge(outcomes, known.get(name, {}), known.get(tree.name))
            good = good and fine and whole
            table.append((name, *map(str, counts.values())))
            details += ["", name, *(f"  {line}" for line in [*notes, *lines])]
    for name, *cells in table:
        print(f"{name:86}", *(f"{cell:>7}" for cell in cells))
    print(*details, sep="\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
