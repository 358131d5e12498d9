"""What limits leave of a host's memory is read rightly from every form of /proc and of cgroups."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from zero.memory.available import host_available, left_in_cgroups


def write(root: Path, path: str, text: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def v2(root: Path, folder: str, limit: str, current: int, files: int = 0, high: str = "max") -> None:
    write(root, f"{folder}/memory.max", limit + "\n")
    write(root, f"{folder}/memory.high", high + "\n")
    write(root, f"{folder}/memory.current", f"{current}\n")
    write(root, f"{folder}/memory.stat", f"anon 5\nfile {files}\ninactive_file {files - files // 4}\n"
          f"active_file {files // 4}\n")  # fmt: skip


def host(root: Path, cgroup: str) -> Path:
    write(root, "proc/self/cgroup", cgroup)
    return root


def test_without_limits_it_is_what_the_machine_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=20000))
    assert host_available(host(tmp_path, "0::/\n")) == 20000
    assert host_available(tmp_path / "no_proc") == 20000


def test_version_2_with_parents(tmp_path: Path) -> None:
    root = host(tmp_path, "0::/user/job/task\n")
    base = "sys/fs/cgroup"
    v2(root, f"{base}/user/job/task", "max", 100)
    v2(root, f"{base}/user/job", "9000000", 3000000)
    v2(root, f"{base}/user", "99000000", 3000000)
    assert sorted(left_in_cgroups(root)) == [6000000, 96000000]
    assert host_available(root) == 6000000
    v2(root, f"{base}/user/job", "9000000", 3000000, high="8000000")  # above that the kernel lets nobody run
    assert host_available(root) == 5000000


def test_pages_of_files_can_be_had_back(tmp_path: Path) -> None:
    root = host(tmp_path, "0::/job\n")
    v2(root, "sys/fs/cgroup/job", "9000000", 8900000, files=8000000)
    assert host_available(root) == 8100000


def test_more_used_than_allowed_is_nothing_left(tmp_path: Path) -> None:
    root = host(tmp_path, "0::/job\n")
    v2(root, "sys/fs/cgroup/job", "1000", 2000)
    assert host_available(root) == 0


@pytest.mark.parametrize("mounted", ["/", "/docker/abc"])
def test_version_1(tmp_path: Path, mounted: str) -> None:
    cgroup = "5:cpu,cpuacct:/elsewhere\n4:memory:/docker/abc/step\n1:name=systemd:/x\n0::/unrelated\n"
    root = host(tmp_path, cgroup)
    inside = "/docker/abc" if mounted == "/" else ""
    for folder, limit in ((f"{inside}/step", 9223372036854771712), (inside, 7000000)):
        base = f"sys/fs/cgroup/memory{folder}"
        write(root, f"{base}/memory.limit_in_bytes", f"{limit}\n")
        write(root, f"{base}/memory.usage_in_bytes", "4000000\n")
        write(root, f"{base}/memory.stat", "inactive_file 1\ntotal_inactive_file 500000\ntotal_active_file 500000\n")
    assert host_available(root) == 4000000


@pytest.mark.parametrize("cgroup", ["0::/../outside\n", "0::/not/mounted/here\n"])
def test_a_container_that_sees_a_part_of_the_tree(tmp_path: Path, cgroup: str) -> None:
    root = host(tmp_path, cgroup)
    v2(root, "sys/fs/cgroup", "3000000", 1000000)
    assert host_available(root) == 2000000


@pytest.mark.parametrize("cgroup", ["", "nonsense\n", "4:memory\n"])
def test_what_cannot_be_read_sets_no_limit(tmp_path: Path, cgroup: str) -> None:
    root = host(tmp_path, cgroup)
    assert list(left_in_cgroups(root)) == []
