"""`zero run` with real processes. The scripts import no torch unless the test is about it, so that this is fast."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from nodes import OURS, ROOT, alive, environment, eventually
from ports import free_port

from zero.__main__ import main
from zero.launch.args.run import LaunchError, check_script
from zero.launch.node.attempt_end import Failure, end_of

# One write with its newline: the ranks run unbuffered on one pipe, where the pieces that print() writes would mix.
SHOW = f"import os, sys; sys.stdout.write('|'.join([*(os.environ[k] for k in {OURS!r}), *sys.argv[1:]]) + chr(10))"


@pytest.fixture
def script(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


@pytest.fixture
def zero(launchers):
    def run(*args: str, **extra: str) -> subprocess.CompletedProcess:
        return launchers.run(*args, environment=environment(**extra))

    return run


def gone(pids: list[int]) -> bool:
    return eventually(lambda: not any(map(alive, pids)))


def test_two_ranks_and_their_environment(zero, script):
    ended = zero("run", "--num_gpus", "2", script(SHOW), "--lr", "1", "a b", "--num_gpus", "9", "x$$y ${local_rank}")
    assert ended.returncode == 0, ended.stderr
    ranks = sorted(line.split("|") for line in ended.stdout.splitlines())
    cores = len(os.sched_getaffinity(0))
    ports = {rank[5] for rank in ranks}
    assert len(ports) == 1
    for number, rank in enumerate(ranks):
        assert rank[:5] == [str(number), "2", str(number), "2", "127.0.0.1"]
        assert rank[6] == str(max(1, cores // 2))
        assert rank[7:] == ["--lr", "1", "a b", "--num_gpus", "9", "x$$y ${local_rank}"]
    # Lines of ours, and nothing of torch's.
    assert ended.stderr.splitlines() == [
        "zero run: --num_gpus behind the script: given to it, which does not name it; options of zero run go before "
        "the script",
        f"zero run: OMP_NUM_THREADS={max(1, cores // 2)} for each rank ({cores} cores, 2 ranks)",
        "zero run: warning: 2 ranks ran, and none called zero.initialize(): nothing was shared out by zero",
    ]


def test_address_port_threads_and_temporary_folder_of_the_user(zero, tmp_path, script):
    folder = tmp_path / "scratch"
    folder.mkdir()
    environment = {"OMP_NUM_THREADS": "3", "TMPDIR": str(folder)}
    port = str(free_port())
    ended = zero("run", "--master_addr", "localhost", "--master_port", port, script(SHOW), **environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"0|1|0|1|localhost|{port}|3\n"
    assert ended.stderr == "zero run: no GPU is visible: 1 process on the CPU (--num_gpus N starts N)\n"
    assert list(folder.iterdir()) == [], "something was left behind"


def test_module_and_program(zero, tmp_path):
    (tmp_path / "mine.py").write_text(SHOW)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-m", "zero", "run", "--num_gpus", "1", "--module", "mine", "arg"]
    ended = subprocess.run(command, env=environment(PYTHONPATH=path), capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stdout.strip().rsplit("|", 1)[1]) == (0, "arg"), ended.stderr
    ended = zero("run", "--num_gpus", "1", "--no_python", "echo", "hello")
    assert (ended.returncode, ended.stdout) == (0, "hello\n"), ended.stderr


@pytest.mark.parametrize(("number", "twice"), [(signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGTERM, True)])
def test_a_signal_leaves_no_process(launchers, tmp_path, script, number, twice):
    path = script(
        """
        import os, signal, subprocess, sys, time
        # A helper in a session of its own, which no signal to the rank's process group reaches.
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        with open(os.path.join(sys.argv[1], os.environ["RANK"] + ".tmp"), "w") as file:
            file.write(f"{os.getpid()} {helper.pid}")
        os.rename(file.name, file.name[:-4] + ".pid")
        time.sleep(600)
        """
    )
    command = ["run", "--num_gpus", "2", path, str(tmp_path)]
    with launchers.start(*command, environment=environment()) as launcher:
        assert eventually(lambda: len(list(tmp_path.glob("*.pid"))) == 2), launcher.texts()
        pids = [int(pid) for file in tmp_path.glob("*.pid") for pid in file.read_text().split()]
        assert len(pids) == 4
        launcher.send_signal(number)
        if twice:
            launcher.send_signal(number)
        _, said = launcher.communicate()
    assert gone(pids)
    assert launcher.returncode == 128 + number
    assert said.splitlines()[-1] == f"zero run: stopped by {number.name}"


def test_a_signal_that_is_ignored_stays_so_as_under_nohup(launchers, tmp_path, script):
    path = script(
        """
        import os, signal, sys, time
        sys.stdout.write(f"ignored {signal.getsignal(signal.SIGHUP) == signal.SIG_IGN}\\n")
        open(os.path.join(sys.argv[1], "up"), "w").close()
        while not os.path.exists(os.path.join(sys.argv[1], "go")):
            time.sleep(0.02)
        """
    )
    command = ["run", "--num_gpus", "1", path, str(tmp_path)]
    with launchers.start(*command, environment=environment(), ignored=[signal.SIGHUP]) as launcher:
        assert eventually((tmp_path / "up").exists), launcher.texts()
        launcher.send_signal(signal.SIGHUP)
        (tmp_path / "go").touch()
        assert launcher.communicate()[0] == "ignored True\n"
        assert launcher.returncode == 0


def test_what_a_killed_rank_started_ends_too(zero, tmp_path, script):
    path = script(
        """
        import os, signal, subprocess, sys
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        with open(os.path.join(sys.argv[1], "helper.pid"), "w") as file:
            file.write(str(helper.pid))
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert zero("run", "--num_gpus", "1", path, str(tmp_path)).returncode == 137
    assert gone([int((tmp_path / "helper.pid").read_text())])


@pytest.mark.long
def test_restarts_recover_with_gloo_on_one_port_and_after_everything_of_the_failed_attempt_is_gone(
    zero, tmp_path, script
):
    path = script(
        """
        import os, signal, subprocess, sys, torch
        import torch.distributed as dist
        attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
        before = [int(pid) for name in os.listdir(sys.argv[1]) if not name.startswith(attempt)
                  for pid in open(os.path.join(sys.argv[1], name)).read().split()]
        left = [pid for pid in before if os.path.exists(f"/proc/{pid}")]
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        with open(os.path.join(sys.argv[1], f"{attempt}-{rank}"), "w") as file:
            file.write(f"{os.getpid()} {helper.pid}")
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        if attempt == rank == "0":  # which hosts the store
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(total)
        port = os.environ["MASTER_PORT"]
        sys.stdout.write(f"attempt {attempt} total {total.item():.0f} port {port} before {len(before)} left {left}\\n")
        dist.destroy_process_group()
        helper.kill()
        """
    )
    notes = tmp_path / "pids"
    notes.mkdir()
    port = str(free_port())
    ended = zero("run", "--num_gpus", "2", "--max_restarts", "2", "--master_port", port, path, str(notes))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [f"attempt 1 total 4 port {port} before 4 left []"] * 2
    (said,) = [line for line in ended.stderr.splitlines() if line.startswith("zero run: rank")]
    assert re.fullmatch(r"zero run: rank 0 was killed by SIGKILL .*\bpid \d+\)?; restart 1 of 2", said), said


def test_restarts_that_do_not_help_end_with_the_last_failure(zero, script):
    path = script("import os, sys; sys.exit(3 + int(os.environ['TORCHELASTIC_RESTART_COUNT']))")
    ended = zero("run", "--num_gpus", "1", "--max_restarts", "2", path)
    assert ended.returncode == 5
    said = [re.sub(r"pid \d+", "pid", line) for line in ended.stderr.splitlines()[-3:]]
    assert said == [
        "zero run: rank 0 failed first, with exit code 3 (pid); restart 1 of 2",
        "zero run: rank 0 failed first, with exit code 4 (pid); restart 2 of 2",
        "zero run: rank 0 failed first, with exit code 5 (pid); no restart is left of 2",
    ]


def test_of_ranks_that_die_together_the_killed_one_is_named():
    killed = end_of([Failure(0, 1, 7), Failure(1, -6, 7)])
    assert (killed.text, killed.status) == ("rank 1 was killed by SIGABRT, pid 7", 134)
    # SIGTERM is how ranks are ended, and no cause.
    first = end_of([Failure(1, 4, 7), Failure(0, -15, 7)])
    assert (first.text, first.status) == ("rank 1 failed first, with exit code 4 (pid 7)", 4)


def test_log_dir_has_a_file_per_rank_which_is_named_where_one_fails(zero, tmp_path, script):
    logs, path = tmp_path / "logs", script("import os; print('I am', os.environ['RANK']); raise OSError('disk')")
    ended = zero("run", "--num_gpus", "2", "--log_dir", str(logs), path)
    assert ended.returncode == 1, ended.stderr
    (log,) = re.findall(r"exit code 1 .*: OSError: disk; its output is in (.+)", ended.stderr)
    assert Path(log).read_text().endswith("OSError: disk\n")
    assert sorted(file.read_text() for file in logs.rglob("stdout.log")) == ["I am 0\n", "I am 1\n"]
    assert sorted(ended.stdout.splitlines()) == ["[rank 0]: I am 0", "[rank 1]: I am 1"]


def test_dry_run_prints_and_starts_nothing(zero, tmp_path, script):
    path = script("import pathlib, sys; pathlib.Path(sys.argv[1]).touch()")
    port = str(free_port())
    ended = zero("run", "--num_gpus", "2", "--dry-run", "--master_port", port, path, str(tmp_path / "ran it"))
    assert ended.returncode == 0, ended.stderr
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert ended.stdout.splitlines() == [
        f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port} "
        f"OMP_NUM_THREADS={threads} {shlex.quote(sys.executable)} -u {path} '{tmp_path / 'ran it'}'"
        for rank in range(2)
    ]
    assert not (tmp_path / "ran it").exists()


def test_a_module_of_an_editable_installation_is_found(monkeypatch):
    """Such an installation may be no folder of the Python path, but a finder."""

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return ModuleSpec(name, None) if name == "installed_editable" else None

    with pytest.raises(LaunchError, match="no module 'installed_editable'"):
        check_script("installed_editable.main", True, False)
    monkeypatch.setattr(sys, "meta_path", [object(), *sys.meta_path, Finder])
    check_script("installed_editable.main", True, False)


def test_port_that_is_taken(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["run", "--master_port", port, "--dry-run", __file__]) == 2
    assert capsys.readouterr().err.startswith(f"zero run: error: --master_port: cannot listen on {port} ")


@pytest.mark.parametrize("args", [["run", "--help"], ["--help"], ["run", "nope.py"], ["run", "--no_python", "true"]])
def test_what_starts_ranks_without_a_gpu_or_none_at_all_imports_no_torch(args):
    code = (
        "import sys\nfrom zero.__main__ import main\n"
        f"try: main({args!r})\nexcept SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_a_long_line_of_a_rank_stays_one_line_and_a_bar_that_moves_becomes_lines(zero, tmp_path, script):
    text = "import os; os.write(1, b'x' * 3_000_000 + b' 50%'); os.write(1, bytes([13]) + b'100%' + bytes([13, 10]))"
    ended = zero("run", "--num_gpus", "1", "--log_dir", str(tmp_path / "logs"), script(text))
    assert ended.stdout == f"[rank 0]: {'x' * 3_000_000} 50%\n[rank 0]: 100%\n"
    (log,) = (tmp_path / "logs").rglob("stdout.log")
    assert log.read_bytes() == b"x" * 3_000_000 + b" 50%\r100%\r\n"


def test_what_torchs_record_writes_is_the_message(zero, script):
    path = script(
        """
        import os
        from torch.distributed.elastic.multiprocessing.errors import record
        names = ["TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE",
                 "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE", "NODE_RANK", "TORCH_NCCL_ASYNC_ERROR_HANDLING"]
        assert [os.environ[name] for name in names] == ["0", "0", "False", "1", "1", "0", "1"]
        @record
        def main():
            raise ValueError("written by record")
        main()
        """
    )
    ended = zero("run", "--num_gpus", "1", path)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert re.fullmatch(r"zero run: rank 0 failed .* \(pid \d+\): ValueError: written by record", last)
