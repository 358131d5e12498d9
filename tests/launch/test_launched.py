"""The promise: from what each launcher sets, a process knows its rank, or that it is alone, or says why not.

The environments are what Open MPI 4.1, Hydra of MPICH 4.0, and Slurm as its manual pages srun(1) and sbatch(1) have it
set; and Kubeflow's operator, SageMaker and AzureML by their documentation. The manifest of docs/launching.md is read.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from pages import ROOT, blocks

from zero.launch.launched import SLURM_PORTS, Launched, launched

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n1",
    "MASTER_PORT": "1234",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "157286401", "PMIX_RANK": "1",
    "PMIX_SERVER_URI2": "157286400.0;tcp4://127.0.0.1:60503", "OMPI_MCA_orte_hnp_uri": "157286400.0;tcp://192.0.2.2:3",
}  # fmt: skip
OPEN_MPI_HOSTS = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", "PMI_FD": "6"}
HYDRA_HOSTS = {**HYDRA, "PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALNRANKS": "1"}
BATCH = {
    "SLURM_JOB_ID": "700", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_NTASKS": "5", "SLURM_NPROCS": "5",
    "SLURM_TASKS_PER_NODE": "2(x2),1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
    "SLURM_TASK_PID": "77",
}  # fmt: skip
STEP = {
    **BATCH, "SLURM_STEP_ID": "2", "SLURM_STEPID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[2-3]", "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_PROCID": "2", "SLURM_NODEID": "1",
}  # fmt: skip
STEP_HERE = {**STEP, "SLURM_STEP_NODELIST": "n2", "SLURM_LOCALID": "2", "SLURM_NODEID": "0"}
SALLOC_SHELL = {**BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEPID": "4294967290", "SLURM_PTY_PORT": "4"}
PMI2 = {"PMI_RANK": "2", "PMI_SIZE": "3", "PMI_FD": "9"}  # of srun --mpi=pmi2
POD = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "train-master-0", "MASTER_PORT": "23456"}  # of a PyTorchJob
POD |= {"PET_NNODES": "4", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "train-master-0", "PET_MASTER_PORT": "23456"}
SAGEMAKER = {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "2"}
AZURE = {"AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.4"}
OPEN_MPI_JOB = "157286401 157286400.0;tcp4://127.0.0.1:60503 157286400.0;tcp://192.0.2.2:3"
GIVEN = Launched(3, 4, 1, 2, "n1", 1234)
STEP_PORT = SLURM_PORTS.start + 700 + 2 * 1009
HERE = "127.0.0.1"
ADDRESS = {"MASTER_ADDR": "n7"}
WHERE = {**ADDRESS, "MASTER_PORT": "55"}
WHO = {"RANK": "1", "WORLD_SIZE": "2"}


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {key: value for key, value in environment.items() if key not in names}


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, None),
        ({"PATH": "/bin", **WHERE}, None),
        ({"WORLD_SIZE": "1"}, None),
        ({"RANK": "0", "LOCAL_RANK": "0"}, None),
        (TORCHRUN, GIVEN),
        (without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE"), Launched(3, 4, None, None, "n1", 1234)),
        ({"RANK": "0", "WORLD_SIZE": "1", **WHERE}, Launched(0, 1, None, None, "n7", 55)),
        # Open MPI.
        (OPEN_MPI, Launched(1, 2, 1, 2, HERE, None, OPEN_MPI_JOB)),
        ({**OPEN_MPI, **WHERE}, Launched(1, 2, 1, 2, "n7", 55, OPEN_MPI_JOB)),
        ({**OPEN_MPI, "MASTER_PORT": "55"}, Launched(1, 2, 1, 2, HERE, 55, OPEN_MPI_JOB)),
        ({**OPEN_MPI_HOSTS, **ADDRESS}, Launched(3, 4, 1, 2, "n7", 29999, OPEN_MPI_JOB)),
        ({**OPEN_MPI_HOSTS, **WHERE}, Launched(3, 4, 1, 2, "n7", 55, OPEN_MPI_JOB)),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
             "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            None,
        ),
        ({**OPEN_MPI, "WORLD_SIZE": "1"}, None),
        # MPICH and Intel MPI.
        (HYDRA, Launched(0, 2, 0, 2, HERE, None, "")),
        ({**HYDRA_HOSTS, **ADDRESS}, Launched(2, 3, 0, 1, "n7", 29999)),
        # Kubernetes; with PET_NPROC_PER_NODE of a torchrun in the pod.
        (POD, Launched(1, 4, None, None, "train-master-0", 23456)),
        ({**POD, "PET_NPROC_PER_NODE": "auto"}, Launched(1, 4, None, None, "train-master-0", 23456)),
        ({**POD, "PET_NPROC_PER_NODE": "1"}, Launched(1, 4, None, None, "train-master-0", 23456)),
        ({**POD, **TORCHRUN, "PET_NPROC_PER_NODE": "2"}, GIVEN),
        # SageMaker: torchrun, mpirun, and one host alone.
        ({**SAGEMAKER, **TORCHRUN}, GIVEN),
        ({**SAGEMAKER, **OPEN_MPI_HOSTS}, Launched(3, 4, 1, 2, "algo-1", 29999, OPEN_MPI_JOB)),
        ({**SAGEMAKER, **OPEN_MPI_HOSTS, **WHERE}, Launched(3, 4, 1, 2, "n7", 55, OPEN_MPI_JOB)),
        ({**SAGEMAKER, "SM_HOSTS": '["algo-1"]'}, None),
        ({**SAGEMAKER, "SM_HOSTS": "algo-1"}, None),
        ({**SAGEMAKER, "WORLD_SIZE": "1"}, None),
        # AzureML: torchrun's variables with another one beside them, and mpirun.
        ({**TORCHRUN, **AZURE, "NODE_RANK": "1"}, GIVEN),
        ({**AZURE, **OPEN_MPI}, Launched(1, 2, 1, 2, HERE, None, OPEN_MPI_JOB)),
        ({**AZURE, **OPEN_MPI_HOSTS}, Launched(3, 4, 1, 2, "10.0.0.4", 29999, OPEN_MPI_JOB)),
        ({"AZ_BATCH_MASTER_NODE": "10.0.0.5:6000", **AZURE, **OPEN_MPI_HOSTS},
         Launched(3, 4, 1, 2, "10.0.0.5", 29999, OPEN_MPI_JOB)),
        ({"AZ_BATCH_MASTER_NODE": "10.0.0.5", **HYDRA_HOSTS}, Launched(2, 3, 0, 1, "10.0.0.5", 29999)),
        # Slurm.
        (STEP, Launched(2, 3, 0, 1, "n2", STEP_PORT, "slurm  700.2")),
        ({**STEP, **WHERE}, Launched(2, 3, 0, 1, "n7", 55, "slurm  700.2")),
        (STEP_HERE, Launched(2, 3, 2, 3, HERE, None, "slurm  700.2")),
        (without(STEP, "SLURM_STEP_ID"), Launched(2, 3, 0, 1, "n2", STEP_PORT, "slurm  700.2")),
        ({**STEP, **PMI2}, Launched(2, 3, 0, 1, "n2", STEP_PORT, "slurm  700.2")),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        (BATCH, None),
        (SALLOC_SHELL, None),
        ({**BATCH, "SLURM_STEP_ID": "4294967291"}, None),
        (without(BATCH, "SLURM_PROCID"), None),
        # Several at once: who was started last goes first.
        ({**STEP, **OPEN_MPI, **HYDRA, **TORCHRUN}, GIVEN),
        ({**STEP, **OPEN_MPI}, Launched(1, 2, 1, 2, HERE, None, OPEN_MPI_JOB)),
        ({**STEP, **HYDRA}, Launched(0, 2, 0, 2, HERE, None, "")),
        # What is set beside them goes first where it fits, and is completed.
        ({**OPEN_MPI, **WHO}, Launched(1, 2, 1, 2, HERE, None, OPEN_MPI_JOB)),
        ({**OPEN_MPI, **WHO, **WHERE}, Launched(1, 2, 1, 2, "n7", 55, OPEN_MPI_JOB)),
        ({**OPEN_MPI, "RANK": "1", "LOCAL_WORLD_SIZE": "2"}, Launched(1, 2, 1, 2, HERE, None, OPEN_MPI_JOB)),
        ({**OPEN_MPI, **WHERE, "RANK": "0", "WORLD_SIZE": "5"}, Launched(0, 5, None, None, "n7", 55)),
        ({**OPEN_MPI_HOSTS, **WHERE, **WHO}, Launched(1, 2, None, None, "n7", 55)),
    ],
)  # fmt: skip
def test_who_a_process_is(environment: dict[str, str], wanted: Launched | None) -> None:
    assert launched(environment, port=29999) == wanted


@pytest.mark.parametrize("environment", [OPEN_MPI, HYDRA, STEP, STEP_HERE, OPEN_MPI_HOSTS])
def test_only_variables_of_torchrun_count_where_that_is_asked_for(environment: dict[str, str]) -> None:
    assert launched(environment, discover=False) is None
    assert launched({**environment, **TORCHRUN}, discover=False) == GIVEN


@pytest.mark.parametrize(
    ("environment", "more", "text"),
    [
        ({"WORLD_SIZE": "2"}, {}, r"lacks \['RANK', 'MASTER_ADDR', 'MASTER_PORT'\]; start the script with `zero run`"),
        ({**WHO, **ADDRESS}, {}, r"lacks \['MASTER_PORT'\]"),
        (WHO, {}, r"lacks \['MASTER_ADDR', 'MASTER_PORT'\]"),
        ({**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "2"}, {}, r"lacks \['MASTER_ADDR', 'MASTER_PORT'\]"),
        (without(POD, "MASTER_ADDR"), {}, r"lacks \['MASTER_ADDR'\]"),
        ({**POD, "PET_NPROC_PER_NODE": "2"}, {}, "a pod has 2, .* let the command of the pods be `torchrun train.py`"),
        (SAGEMAKER, {}, r"SM_HOSTS names 2 hosts, and RANK is not set, .* distribution=\{\"torch_distributed\": "),
        ({**TORCHRUN, "RANK": "one"}, {}, "RANK: got 'one', wanted a whole number that is not negative"),
        ({**OPEN_MPI, "RANK": "0"}, {}, "RANK=0 is set, but the launcher started this process as RANK=1"),
        ({**OPEN_MPI, "LOCAL_RANK": "7"}, {}, "LOCAL_RANK=7 is set, but the launcher started .* as LOCAL_RANK=1"),
        (OPEN_MPI_HOSTS, {}, r"4 ranks on several hosts \(2 here\), .*`mpirun -x MASTER_ADDR=HOST"),
        (HYDRA_HOSTS, {}, r"3 ranks on several hosts \(1 here\), .*`mpirun -genv MASTER_ADDR HOST"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "-2"}, {}, "OMPI_COMM_WORLD_SIZE: got '-2', wanted a whole number"),
        ({**HYDRA, "PMI_RANK": "2"}, {}, "PMI_RANK: got 2, wanted less than the number of ranks, 2"),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE"), {}, "OMPI_COMM_WORLD_LOCAL_SIZE is not set"),
        (without(STEP, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), {}, "SLURM_STEP_NUM_TASKS and SLURM_NTASKS are not"),
        ({**STEP, "SLURM_STEP_NODELIST": "n[2-"}, {}, r"SLURM_STEP_NODELIST: got 'n\[2-', wanted names"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "3"}, {}, "SLURM_STEP_TASKS_PER_NODE: got '3', wanted .* of 2 hosts"),
        ({**STEP, "SLURM_NODEID": "2"}, {}, "SLURM_STEP_TASKS_PER_NODE: got '2,1'"),
        ({**STEP, "SLURM_PTY_PORT": "4"}, {"terminal": True}, "srun --pty with 3 tasks, .* or set WORLD_SIZE=1"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said(environment: dict[str, str], more: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        launched(environment, **more)


def test_a_terminal_matters_only_where_slurm_has_made_it_for_several_tasks() -> None:
    nested = {**STEP, "SLURM_PTY_PORT": "4"}  # srun without --pty, typed into the shell of one with it
    assert launched(nested) == launched(STEP)
    for environment in (STEP, SALLOC_SHELL, {**nested, **TORCHRUN}, {**nested, "WORLD_SIZE": "1"}):
        assert launched(environment, terminal=True) == launched(environment)


def test_steps_side_by_side_have_ports_of_their_own() -> None:
    steps = [
        {**STEP, "SLURM_JOB_ID": str(9000 + job), "SLURM_STEP_ID": str(step)} for job in range(9) for step in range(9)
    ]
    ports = {found.port for found in map(launched, steps) if found is not None}
    assert len(ports) == 81
    assert all(port in SLURM_PORTS for port in ports)
    assert launched({**STEP, "SLURM_PROCID": "0"}).port == launched(STEP).port


@pytest.mark.parametrize("environment", [OPEN_MPI, HYDRA, STEP, STEP_HERE, {**OPEN_MPI_HOSTS, **ADDRESS}])
def test_what_is_set_afterwards_reads_as_under_torchrun(environment: dict[str, str]) -> None:
    found = launched(environment)
    again = launched({**environment, **found.variables(1234)})
    assert (again.rank, again.world_size, again.address, again.port) == (
        found.rank,
        found.world_size,
        found.address,
        1234,
    )
    assert (again.local_rank, again.local_world_size) == (found.local_rank, found.local_world_size)


def test_the_manifest_of_the_page_is_a_job_whose_pods_know_their_ranks() -> None:
    (block,) = (block for block in blocks(ROOT / "docs" / "launching.md") if block.language == "yaml")
    job = yaml.safe_load(block.text)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob") and job["metadata"]["name"]
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert list(replicas) == ["Master", "Worker"] and replicas["Master"]["replicas"] == 1
    size = sum(kind["replicas"] for kind in replicas.values())
    for kind in replicas.values():
        assert kind["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        pod = kind["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch", "the operator sets variables in a container of that name"
        assert container["image"] and container["command"] == ["python", "train.py"]
        assert [each["name"] for each in container["volumeMounts"]] == [each["name"] for each in pod["volumes"]]
    of_operator = [{**POD, "RANK": str(rank), "WORLD_SIZE": str(size)} for rank in range(size)]
    assert [launched(each) for each in of_operator] == [
        Launched(rank, size, None, None, "train-master-0", 23456) for rank in range(size)
    ]
