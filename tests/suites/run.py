"""Run what other projects test of DeepSpeed, over zero: `python tests/suites/run.py TREE...`; prints a table.

TREE is a source tree of Accelerate, outside of this repository, of the version that is installed. The exit status is
1 when a case fails that KNOWN does not name.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDERS = ("tests/deepspeed",)

# Cases that fail, by a part of their name, and why.
KNOWN = {
    "alst_ulysses_sp": "sequence parallelism is not built",
    "test_basic_run": "it loads a data set from the hub",
}


def run(tree: Path, scratch: Path) -> ElementTree.Element:
    """The results of one tree, as pytest writes them for others."""
    folders = [tree / folder for folder in FOLDERS if (tree / folder).is_dir()]
    if not folders:
        raise SystemExit(f"{tree}: wanted a source tree with one of {', '.join(FOLDERS)}")
    report = scratch / f"{tree.name}.xml"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(scratch / "hub"),
        "OMP_NUM_THREADS": "1",
    }
    options = ["-p", "cpu_plugin", "-q", f"--junitxml={report}", "--rootdir", str(tree), "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *map(str, folders)]
    subprocess.run(command, env=environment, cwd=scratch, check=False)
    return ElementTree.parse(report).getroot()


def outcome(case: ElementTree.Element) -> tuple[str, str]:
    """Passed, failed or skipped, and the first line of why."""
    for tag, word in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(tag)
        if found is not None:
            return word, (found.get("message") or "").strip().split("\n")[0]
    return "passed", ""


def main(trees: list[str]) -> int:
    """Print the table of all trees."""
    unknown = 0
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        subprocess.run([sys.executable, str(HERE / "hub_cache.py"), str(scratch / "hub")], check=True)
        for tree in map(Path, trees):
            counts: dict[str, Counter] = defaultdict(Counter)
            reasons = []
            for case in run(tree.resolve(), scratch).iter("testcase"):
                file = case.get("classname", "").rpartition(".")[0].rpartition(".")[2] or case.get("classname", "")
                word, why = outcome(case)
                counts[file][word] += 1
                if word == "failed":
                    known = next((text for part, text in KNOWN.items() if part in f"{file} {case.get('name')}"), None)
                    unknown += known is None
                    reasons.append(f"  {case.get('name')}: {known or why}")
            print(f"\n{tree.name:<44} passed  failed  skipped")
            for file, count in sorted(counts.items()):
                print(f"  {file:<42} {count['passed']:>6}  {count['failed']:>6}  {count['skipped']:>7}")
            print(*reasons, sep="\n")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
