"""Start the other ranks of this machine with the command of this process and the environment variables of each rank.

The process that the user started becomes the first rank of its node when its first run begins. The other ranks run the
same script from the beginning, as with torchrun.

[Note: folders]
Relative paths on a command line refer to the working folder of the process at its start, but a script may change its
folder before it starts the ranks. The other ranks therefore start in the folder in which the script imported roomier.
Because they run the same script, they change the folder in the same way as rank 0, and relative paths have the same
meaning on all ranks.

[Note: Hydra]
``@hydra.main`` derives the name of an output folder from the current time and can change the working folder to this
folder, so each rank could derive a different one. roomier therefore starts the other ranks with the output folder of
rank 0. Only rank 0 writes Hydra's copy of the configuration.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from roomier.core.errors import RoomierError
from roomier.core.loopback import LOOPBACK
from roomier.core.start_folder import FOLDER_AT_IMPORT
from roomier.core.world import World
from roomier.launch.environment import RANK_VARIABLES, STARTED_BY_ROOMIER, Launch, export, node_of, number_in
from roomier.launch.meet import serve
from roomier.launch.watch import Children, watch_parent

MAX_DEVICES = "ROOMIER_MAX_DEVICES"
"""Name of an environment variable: maximum number of ranks that roomier starts on this machine (default: 4 per core,
but at least 16)."""

PIPES = "ROOMIER_PIPES"
"""Name of an environment variable that roomier sets for the ranks of a notebook. Its value is the file descriptors of
the pipe to the notebook and of the pipes from which the ranks read their work."""

_pipes: tuple[int, ...] = ()
_STORE_TIMEOUT_S = 60.0  # timeout of one request
NUM_THREADS_AT_IMPORT = torch.get_num_threads()


def forget_if_stale(environ: MutableMapping[str, str]) -> None:
    """Remove the variables of a rank from ``environ`` if this process only inherited these variables from a rank.

    If this process is a rank, start watching the process that started this rank.

    Raises:
        SystemExit: the process that started this rank has ended.
    """
    if STARTED_BY_ROOMIER not in environ:
        return
    starter = int(environ[STARTED_BY_ROOMIER])
    if os.getpid() == starter:
        return
    if os.getppid() == starter and environ.get("LOCAL_RANK") != "0":
        watch_parent(starter)
        return
    if not psutil.pid_exists(starter):
        raise SystemExit("roomier: the process that started this rank has ended")
    for name in RANK_VARIABLES:
        environ.pop(name, None)


def start_ranks(world: World) -> tuple[TCPStore | None, Children]:
    """Start the other ranks of this node. This process becomes the first rank of the node.

    Returns:
        The store of the rendezvous (None if ranks also run on other machines), and the started ranks.

    Raises:
        RoomierError: the command cannot be run again, the address of rank 0 is unknown, or there are too many ranks.
    """
    _check_number(world.local_size)
    command = command_again(world.local_size)
    store = None
    if world.is_one_node:
        # The store starts before the other ranks, so no other process can take the port of the store.
        store = serve(LOOPBACK, _STORE_TIMEOUT_S)
        address, port = LOOPBACK, store.port
    else:
        address, port = _given_address(world)
    environ = os.environ
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        environ.pop(name, None)
    export(Launch("roomier", world, address, port), environ)
    environ[STARTED_BY_ROOMIER] = str(os.getpid())
    num_threads = _share_cores(world.local_size)
    processes = {}
    for local_rank in range(1, world.local_size):
        of_rank = dict(environ)
        pipes = (_pipes[0], _pipes[1 + local_rank]) if _pipes else ()
        if pipes:
            of_rank[PIPES] = pipes_text(*pipes)
        export(Launch("roomier", replace(world, rank=world.rank + local_rank, local_rank=local_rank)), of_rank)
        of_rank.setdefault("OMP_NUM_THREADS", str(num_threads))
        processes[world.rank + local_rank] = subprocess.Popen(
            command.words, env=of_rank, stdin=subprocess.DEVNULL, cwd=command.folder, pass_fds=pipes
        )
    for pipe in _pipes[2:]:
        os.close(pipe)
    return store, Children(processes)


def _check_number(num_ranks: int) -> None:
    num_cores = _num_cores()
    default = max(4 * num_cores, 16)
    most = default if MAX_DEVICES not in os.environ else number_in(os.environ, MAX_DEVICES)
    if num_ranks > most:
        problem = f"roomier starts at most {most} ranks on this machine, which has {num_cores} cores"
        action = f"Use devices={most} or fewer, or set the environment variable {MAX_DEVICES} to a larger number"
        raise RoomierError("devices", num_ranks, problem, action)


def _given_address(world: World) -> tuple[str, int]:
    node = node_of(os.environ)
    if node is None or node.address is None or node.port is None:
        names = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
        num_nodes = world.size // world.local_size
        torchrun = f"torchrun --nnodes={num_nodes} --nproc-per-node={world.local_size} --rdzv-endpoint=HOST:PORT ..."
        action = (
            f"Start the script on each node with `srun` in a SLURM allocation or with `{torchrun}`, or set "
            f"{', '.join(name for name in names if name not in os.environ)}"
        )
        raise RoomierError("num_nodes", num_nodes, "roomier can start ranks only on one machine", action)
    return node.address, node.port


def _share_cores(num_ranks: int) -> int:
    """Return the number of threads per rank. Unless the user has set a number, also set this number in this process."""
    num_threads = max(1, _num_cores() // num_ranks)
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() == NUM_THREADS_AT_IMPORT:
        torch.set_num_threads(min(num_threads, NUM_THREADS_AT_IMPORT))
    return num_threads


def _num_cores() -> int:
    """Return the number of cores that this process can use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Command:
    """A command line.

    Attributes:
        words: path of the interpreter, followed by its arguments.
        folder: folder in which the command runs; None means the current folder.
    """

    words: list[str]
    folder: str | None


def is_interactive() -> bool:
    """Return whether this process is a notebook or another interactive session. Python and IPython set the prompt."""
    return hasattr(sys, "ps1")


def command_again(devices: int = 2) -> Command:
    """Return the command that started this process.

    Args:
        devices: number of ranks on this machine, for error messages.

    Raises:
        RoomierError: the command cannot be run again.
    """
    if _pipes:
        return command_of_work()
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    problem = None
    if is_interactive():
        problem = "in a notebook or an interactive session, only a Trainer can start ranks"
    elif multiprocessing.parent_process() is not None:
        problem = "a process of multiprocessing cannot start further ranks"
    elif "PYTEST_CURRENT_TEST" in os.environ and "pytest" in sys.modules:
        problem = "under pytest, further ranks would run the tests again"
    elif file is not None and file.endswith("default_worker.py"):  # the script of Ray's processes
        problem = "a process of Ray cannot start further ranks"
    elif file is None or not _can_be_read_again(file):
        problem = "code from `python -c` or from standard input cannot be run again by further ranks"
    if problem is not None:
        instead = "Use Trainer.fit, or move the run" if is_interactive() else "Move the run"
        action = f"{instead} to a script, started with `python script.py` or `torchrun --nproc-per-node=N script.py`"
        raise RoomierError("devices", devices, problem, action)
    words = [sys.executable, *sys.orig_argv[1:]]
    # The configuration of Hydra itself if this process runs a function under ``@hydra.main``; otherwise,
    # None.
    module = sys.modules.get("hydra.core.hydra_config")
    hydra = module.HydraConfig.get() if module is not None and module.HydraConfig.initialized() else None
    if hydra is None:
        return Command(words, FOLDER_AT_IMPORT if os.path.isdir(FOLDER_AT_IMPORT or "") else None)
    return Command(_with_overrides(words, _same_output_folder(hydra)), hydra.runtime.cwd)


def command_of_work() -> Command:
    """Return the command of a rank of a notebook, which reads its work from a pipe."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from roomier.launch.notebook import work; work()"
    return Command([sys.executable, "-c", code], None)


def pipes_text(reply: int, *pipes: int) -> str:
    """Return the value of the environment variable ``PIPES``."""
    return ",".join(map(str, (reply, *pipes)))


def take_pipes() -> tuple[int, ...]:
    """In a rank of a notebook, return the pipes of this rank, and of the ranks that it starts."""
    global _pipes
    _pipes = tuple(int(pipe) for pipe in os.environ.pop(PIPES).split(","))
    return _pipes


def _can_be_read_again(file: str) -> bool:
    """Return whether ``file`` can be read more than once. Standard input, pipes and devices cannot be read
    again."""
    if file.startswith(("<", "/dev/", "/proc/")):
        return False
    is_in_archive_or_removed = not os.path.exists(file)
    return os.path.isfile(file) or is_in_archive_or_removed


def _same_output_folder(hydra: Any) -> list[str]:
    """Return the overrides that give another process the output folder of this process. See [Note: Hydra]."""
    if hydra.mode.name == "MULTIRUN":
        name, folder = "hydra.sweep.dir", os.path.join(hydra.runtime.cwd, hydra.sweep.dir)
    else:
        name, folder = "hydra.run.dir", hydra.runtime.output_dir
    quoted = folder.replace("\\", "\\\\").replace("'", "\\'")
    return [f"{name}='{quoted}'", "hydra.output_subdir=null"]


def _with_overrides(words: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Insert ``overrides`` after the last override in ``words``, because Hydra cannot parse two separate groups of
    overrides."""
    first = len(words) - len(sys.argv) + 1  # the words before the script belong to the interpreter
    places = [place for place in range(first, len(words)) if "=" in words[place] and not words[place].startswith("-")]
    end = places[-1] + 1 if places else len(words)
    return [*words[:end], *overrides, *words[end:]]
