"""Who this process is among the processes that a launcher started, from the variables that the launcher has set.

Nothing but the given mapping is looked at. torchrun and `zero run` come first, then mpirun, then srun: each of them may
be started by those after it, whose variables its ranks then inherit.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from zero.launch.hosts.nodelist import expand, per_host

PORT = 29500
"""Where ranks on several hosts meet that `mpirun` started; also torchrun's and DeepSpeed's."""
SLURM_PORTS = range(20000, 28192)
"""Of which the steps of Slurm that span several hosts take one each; below the ports that kernels hand out."""

_WHO = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_WHERE = ("MASTER_ADDR", "MASTER_PORT")
# Steps above are no steps that srun made: the batch script, the shell of salloc. SLURM_MAX_NORMAL_STEP_ID in slurm.h.
_LAST_STEP = 0xFFFFFFF0
_HERE = "127.0.0.1"
_AZURE = "AZ_BATCHAI_MPI_MASTER_NODE"


@dataclass(frozen=True)
class Launched:
    """One of the processes that a launcher started.

    local_rank, local_world_size: its place among the ranks of its host, and their number; None where nobody says.
    address: the host of rank 0.
    port: where rank 0 listens; None: rank 0 takes a free one and tells the others, which are all on this host.
    job: what only the ranks of this job have in common; "" where no variable says, as under MPICH and Intel MPI.
    """

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    address: str = ""
    port: int | None = None
    job: str = ""

    def variables(self, port: int) -> dict[str, str]:
        """What torchrun would have set for this rank."""
        values = (self.rank, self.world_size, self.local_rank, self.local_world_size, self.address, port)
        pairs = zip((*_WHO, *_WHERE), values, strict=True)
        return {name: str(value) for name, value in pairs if value is not None}


def launched(
    environment: Mapping[str, str], port: int = PORT, discover: bool = True, terminal: bool = False
) -> Launched | None:
    """The place of the process with this environment; None where it is alone.

    port: for ranks of `mpirun` on several hosts where MASTER_PORT is not set. discover: look at variables of MPI and
    Slurm, too. terminal: whether somebody types what this process reads.
    Raises ValueError where the variables do not say enough or contradict each other.
    """
    if all(name in environment for name in ("RANK", "WORLD_SIZE", *_WHERE)):
        # Complete. Where it comes from matters only for what it leaves open, and so nothing else can be wrong.
        found = None
        with contextlib.suppress(ValueError):
            found = _found(environment, port, discover, terminal=False)
        return _given(environment, found)
    if environment.get("WORLD_SIZE") == "1":
        return None
    found = _found(environment, port, discover, terminal)
    if "RANK" in environment and "WORLD_SIZE" in environment:
        given = _given(environment, found)
        agrees = found is not None and (given.rank, given.world_size) == (found.rank, found.world_size)
        if given.address and (given.port is not None or agrees):
            return given
    elif found is not None:
        return _checked(environment, found)
    elif "WORLD_SIZE" not in environment:
        if discover and len(hosts := _of_sagemaker(environment)) > 1:
            raise ValueError(
                f"SM_HOSTS names {len(hosts)} hosts, and RANK is not set, so each would train alone; give the "
                'estimator distribution={"torch_distributed": {"enabled": True}}, or set WORLD_SIZE=1'
            )
        return None
    missing = [name for name in ("RANK", "WORLD_SIZE", *_WHERE) if name not in environment]
    raise ValueError(
        f"the environment describes a distributed run but lacks {missing}; "
        "start the script with `zero run`, `torchrun`, `srun` or `mpirun`, which set what is needed"
    )


def _given(environment: Mapping[str, str], found: Launched | None) -> Launched:
    """What RANK and WORLD_SIZE say, completed by `found` where that is the same rank."""
    rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    # A PyTorchJob counts ranks that torchrun would start; RANK is the number of a pod then.
    if (
        "LOCAL_RANK" not in environment
        and (each := environment.get("PET_NPROC_PER_NODE", "")).isdecimal()
        and each != "1"
    ):
        raise ValueError(
            f"PET_NPROC_PER_NODE={each}: {size} ranks are waited for, of which a pod has {each}, and this process was "
            "started alone; let the command of the pods be `torchrun train.py`, or leave nprocPerNode out"
        )
    same = found if found is not None and (found.rank, found.world_size) == (rank, size) else None
    made = same or Launched(rank, size, None, None)
    local = {
        key: _number(environment, name)
        for key, name in (("local_rank", "LOCAL_RANK"), ("local_world_size", "LOCAL_WORLD_SIZE"))
        if name in environment
    }
    return replace(_where(environment, made), **local)


def _checked(environment: Mapping[str, str], found: Launched) -> Launched:
    """`found` where no variable that torchrun sets says otherwise."""
    for name, value in found.variables(0).items():
        if name in _WHO and name in environment and environment[name] != value:
            raise ValueError(
                f"{name}={environment[name]} is set, but the launcher started this process as {name}={value}; "
                f"set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or leave {name} out"
            )
    return _where(environment, found)


def _where(environment: Mapping[str, str], made: Launched) -> Launched:
    """`made` with the address and the port that are set, which go before all that is found."""
    port = _number(environment, "MASTER_PORT") if "MASTER_PORT" in environment else made.port
    return replace(made, address=environment.get("MASTER_ADDR", made.address), port=port)


def _found(environment: Mapping[str, str], port: int, discover: bool, terminal: bool) -> Launched | None:
    """What MPI or Slurm says; None where neither has started more than one process."""
    if not discover:
        return None
    found = _open_mpi(environment, port) or _hydra(environment, port) or _slurm(environment, terminal)
    return found if found is not None and found.world_size > 1 else None


def _open_mpi(environment: Mapping[str, str], port: int) -> Launched | None:
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    # The name of a job comes from a process id, which another job may have had; the address of its server does not.
    names = ("PMIX_NAMESPACE", "PMIX_SERVER_URI2", "OMPI_MCA_orte_hnp_uri")
    job = " ".join(environment[name] for name in names if name in environment)
    words = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return _mpi(environment, tuple(f"OMPI_COMM_WORLD_{word}" for word in words), port, job)


def _hydra(environment: Mapping[str, str], port: int) -> Launched | None:
    """MPICH and Intel MPI. With --mpi=pmi2, srun sets the first two as well, and says the rest in its own words."""
    if "PMI_RANK" not in environment or "MPI_LOCALRANKID" not in environment:
        return None
    return _mpi(environment, ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), port, "")


def _mpi(environment: Mapping[str, str], names: tuple[str, ...], port: int, job: str) -> Launched:
    rank, size, local_rank, local_size = (_number(environment, name) for name in names)
    _below(names[0], rank, size)
    _below(names[2], local_rank, local_size)
    if local_size == size:
        return Launched(rank, size, local_rank, size, _HERE, None, job)
    # AzureML and SageMaker start mpirun, and name the first host in words of their own.
    azure = environment.get("AZ_BATCH_MASTER_NODE", "").partition(":")[0] or environment.get(_AZURE)
    address = environment.get("MASTER_ADDR") or azure or next(iter(_of_sagemaker(environment)), None)
    if address is None:
        raise ValueError(
            f"mpirun started {size} ranks on several hosts ({local_size} here), and MASTER_ADDR is not set; name the "
            "host of rank 0: `mpirun -x MASTER_ADDR=HOST ...` (Open MPI), `mpirun -genv MASTER_ADDR HOST ...` (MPICH)"
        )
    return Launched(rank, size, local_rank, local_size, address, port, job)


def _of_sagemaker(environment: Mapping[str, str]) -> list[str]:
    """The hosts of a training job of SageMaker, the first in front."""
    try:
        return sorted(json.loads(environment.get("SM_HOSTS", "[]")))
    except (TypeError, ValueError):
        return []


def _slurm(environment: Mapping[str, str], terminal: bool) -> Launched | None:
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", ""))
    # A batch script and the shell of salloc have SLURM_PROCID and SLURM_NTASKS, too, but no other tasks.
    if "SLURM_PROCID" not in environment or not step.isdecimal() or int(step) > _LAST_STEP:
        return None
    size = _number(environment, _first(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))
    if size == 1:
        return None
    if terminal and "SLURM_PTY_PORT" in environment:
        raise ValueError(
            f"this is a terminal of srun --pty with {size} tasks, where the others may have started nothing; start the "
            "script with `srun` without --pty or with `zero run`, or set WORLD_SIZE=1 to train with this process alone"
        )
    rank, local_rank = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_LOCALID")
    _below("SLURM_PROCID", rank, size)
    job = f"slurm {environment.get('SLURM_CLUSTER_NAME', '')} {_number(environment, 'SLURM_JOB_ID')}.{step}"
    key = _first(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    hosts = expand(environment[key], key)
    if len(hosts) == 1:
        return Launched(rank, size, local_rank, size, _HERE, None, job)
    key = _first(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    tasks, node = per_host(environment[key], len(hosts)), _number(environment, "SLURM_NODEID")
    if tasks is None or node >= len(tasks):
        raise ValueError(f"{key}: got {environment[key]!r}, wanted the numbers of tasks of {len(hosts)} hosts")
    # The same on all its hosts; the factor keeps the first steps of a job away from those of the next jobs.
    port = SLURM_PORTS[(_number(environment, "SLURM_JOB_ID") + 1009 * int(step)) % len(SLURM_PORTS)]
    return Launched(rank, size, local_rank, tasks[node], hosts[0], port, job)


def _first(environment: Mapping[str, str], *names: str) -> str:
    for name in names:
        if environment.get(name):
            return name
    raise ValueError(f"SLURM_PROCID is set, but {' and '.join(names)} are not; start the script with `srun`")


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name)
    if text is None:
        raise ValueError(f"{name} is not set, although other variables of its launcher are")
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{name}: got {text!r}, wanted a whole number that is not negative")
    return int(text)


def _below(name: str, rank: int, size: int) -> None:
    if rank >= size:
        raise ValueError(f"{name}: got {rank}, wanted less than the number of ranks, {size}")
