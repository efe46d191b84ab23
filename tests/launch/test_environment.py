"""Environment variables of each launcher, and the ranks that are derived from them."""

import pytest

from roomier.core.errors import RoomierError
from roomier.core.world import World
from roomier.launch.environment import (
    RANK_VARIABLES,
    LaunchedNode,
    export,
    first_host,
    launch_of,
    node_of,
    tasks_per_node,
)
from roomier.launch.job import job_names, num_restarts

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "4000",
}
SLURM = {
    "SLURM_JOB_ID": "123",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def test_a_process_without_a_launcher_is_not_a_rank() -> None:
    assert launch_of({"PATH": "/bin", "MASTER_ADDR": "stale", "WORLD_SIZE": "4"}) is None


def test_torchrun() -> None:
    launch = launch_of(TORCHRUN)
    assert launch is not None
    assert launch.launcher == "torchrun"
    assert launch.world == World(5, 8, local_rank=1, node_rank=1, local_size=4)
    assert (launch.address, launch.port, launch.num_nodes) == ("node1", 4000, 2)


def test_one_process_per_machine_with_only_its_rank() -> None:
    launch = launch_of({"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "master-0", "MASTER_PORT": "23456"})
    assert launch is not None
    assert launch.world == World(1, 3, local_rank=0, node_rank=1, local_size=1)


def test_slurm() -> None:
    launch = launch_of(SLURM)
    assert launch is not None
    assert launch.launcher == "SLURM"
    assert launch.world == World(3, 4, local_rank=1, node_rank=1, local_size=2)
    assert launch.address == "gpu07"
    others = launch_of({**SLURM, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"})
    assert others is not None
    assert launch.port == others.port
    other_job = launch_of({**SLURM, "SLURM_JOB_ID": "124"})
    assert other_job is not None
    assert launch.port != other_job.port


def test_torchrun_within_slurm_is_torchrun() -> None:
    launch = launch_of({**SLURM, **TORCHRUN})
    assert launch is not None
    assert launch.launcher == "torchrun"


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_ID": None},  # the script of sbatch
        {"SLURM_STEP_ID": str(0xFFFFFFFA)},  # the shell of salloc
        {"SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash, or one task that starts the ranks
    ],
)
def test_processes_outside_of_a_job_step_with_several_tasks_are_not_ranks(changes: dict[str, str | None]) -> None:
    environ = {name: value for name, value in {**SLURM, **changes}.items() if value is not None}
    assert launch_of(environ) is None


def test_mpi() -> None:
    for environ in (
        OPEN_MPI,
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
    ):
        launch = launch_of(environ)
        assert launch is not None
        assert launch.launcher == "MPI"
        assert launch.world == World(1, 2, local_rank=1, node_rank=0, local_size=2)
        assert launch.address == "127.0.0.1"


@pytest.mark.parametrize(
    ("environ", "field", "text"),
    [
        ({**TORCHRUN, "RANK": "first"}, "RANK", "must be an integer"),
        ({**TORCHRUN, "RANK": "8"}, "RANK", "out of range"),
        ({**TORCHRUN, "WORLD_SIZE": "7"}, "WORLD_SIZE", "must be a multiple of 4"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE", "tasks per node"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3,1"}, "RANK", "out of range"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}, "MASTER_ADDR", "Set MASTER_ADDR"),
    ],
)
def test_inconsistent_variables_are_rejected(environ: dict[str, str], field: str, text: str) -> None:
    with pytest.raises(RoomierError, match=text) as caught:
        launch_of(environ)
    assert caught.value.field == field


KUBEFLOW = {
    "PET_NODE_RANK": "1",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "8",
    "PET_MASTER_ADDR": "run-node-0-0.run",
    "PET_MASTER_PORT": "29400",
    "JOB_COMPLETION_INDEX": "1",
}
SKYPILOT = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
DSTACK = {"DSTACK_NODE_RANK": "1", "DSTACK_NODES_NUM": "2", "DSTACK_MASTER_NODE_IP": "10.0.0.1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (KUBEFLOW, LaunchedNode("Kubeflow Trainer", "PET_NODE_RANK", 1, 2, "run-node-0-0.run", 29400)),
        (SKYPILOT, LaunchedNode("SkyPilot", "SKYPILOT_NODE_RANK", 1, 2, "10.0.0.1", 29500)),
        (DSTACK, LaunchedNode("dstack", "DSTACK_NODE_RANK", 1, 2, "10.0.0.1", 29500)),
        (
            {"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "a", "MASTER_PORT": "4000"},
            LaunchedNode("Kubernetes", "JOB_COMPLETION_INDEX", 1, None, "a", 4000),
        ),
        ({**KUBEFLOW, "NODE_RANK": "0"}, LaunchedNode("your script", "NODE_RANK", 0, None, None, None)),
        ({"SKYPILOT_NUM_NODES": "2"}, None),
    ],
)
def test_nodes_of_launchers_that_start_one_process_on_each(
    environ: dict[str, str], expected: LaunchedNode | None
) -> None:
    assert node_of(environ) == expected


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({**KUBEFLOW, "PET_NODE_RANK": "2"}, "PET_NODE_RANK=2: is not the index of a node, because PET_NNODES is 2"),
        ({**SKYPILOT, "SKYPILOT_NODE_RANK": "first"}, "SKYPILOT_NODE_RANK='first': must be an integer"),
        ({**DSTACK, "DSTACK_NODES_NUM": "all"}, "DSTACK_NODES_NUM='all': must be an integer"),
    ],
)
def test_inconsistent_variables_of_nodes_are_rejected(environ: dict[str, str], text: str) -> None:
    with pytest.raises(RoomierError, match=text):
        node_of(environ)


def test_a_launch_is_exported_in_the_names_of_torchrun() -> None:
    launch = launch_of(SLURM)
    assert launch is not None
    environ: dict[str, str] = {"MASTER_PORT": "999"}  # a value that the user set is kept
    export(launch, environ)
    again = launch_of(environ)
    assert again is not None
    assert again.world == launch.world
    assert (again.address, again.port) == ("gpu07", 999)
    assert set(environ) < set(RANK_VARIABLES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n1", "n1"),
        ("n[1-3]", "n1"),
        ("n[08-11],login", "n08"),
        ("login,n[08-11]", "login"),
        ("a[1,3-4]-ib,b[2]", "a1-ib"),
        ("r[1-2]c[5-6]", "r1c5"),
    ],
)
def test_first_host_of_a_list(text: str, expected: str) -> None:
    assert first_host(text) == expected


@pytest.mark.parametrize("text", ["gpu[07-", "gpu]", ","])
def test_malformed_list_of_hosts_is_an_error(text: str) -> None:
    with pytest.raises(RoomierError, match="must be a SLURM list of hosts"):
        first_host(text)


def test_tasks_per_node() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]


def test_names_of_a_job() -> None:
    assert job_names(TORCHRUN) == []
    assert job_names({"ROOMIER_JOB": "gpt"}) == ["job gpt"]
    assert job_names({"TORCHELASTIC_RUN_ID": "a"}) != job_names({"TORCHELASTIC_RUN_ID": "b"})
    assert job_names({"TORCHELASTIC_RUN_ID": "a"}) == job_names({"TORCHELASTIC_RUN_ID": "a"})
    assert job_names(SLURM) == ["slurm  123 0"]
    assert job_names({**SLURM, "SLURM_STEP_ID": "1"}) != job_names(SLURM)
    assert num_restarts({}) == 0
    assert num_restarts({"TORCHELASTIC_RESTART_COUNT": "2"}) == 2
    assert num_restarts({"SLURM_RESTART_COUNT": "1"}) == 1
