"""A SLURM cluster of one node for tests: slurmctld and slurmd on the loopback interface, without authentication.

``make slurm`` unpacks the programs of SLURM and does not install them, because Lightning warns if ``srun`` is on the
PATH.
"""

import getpass
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = Path(__file__).parents[2] / ".cache" / "slurm" / "usr"
LIMIT_S = 120.0  # on a busy machine; the programs start within 2 s on an idle one

# cred_expire is the time for which a requeued job stays in the queue.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
JobAcctGatherType=jobacct_gather/none
MailProg=/bin/true
SchedulerParameters=sched_min_interval=0,sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
KillWait=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=16
PartitionName=main Nodes={host} Default=YES State=UP OverSubscribe=YES
"""


def wait_until(condition: Callable[[], bool], what: Callable[[], str], limit_s: float = LIMIT_S) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, what()
        time.sleep(0.1)


class Cluster:
    """A running cluster.

    Attributes:
        environ: environment variables for programs of SLURM and for jobs.
    """

    def __init__(self, folder: Path) -> None:
        libraries = next(PROGRAMS.glob("lib/*/slurm-wlm"))
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        ports = [each.getsockname()[1] for each in listeners]
        for each in listeners:
            each.close()
        values = {
            "host": socket.gethostname().partition(".")[0],
            "controller_port": ports[0],
            "node_port": ports[1],
            "user": getpass.getuser(),
            "plugins": libraries,
            "folder": folder,
        }
        (folder / "state").mkdir()
        (folder / "spool").mkdir()
        (folder / "slurm.conf").write_text(CONFIGURATION.format(**values))
        path = [str(PROGRAMS / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
            "SLURM_CONF": str(folder / "slurm.conf"),
            "LD_LIBRARY_PATH": f"{libraries}:{libraries.parent}",
            "PATH": ":".join(path),
        }

    def run(self, *words: str) -> str:
        done = subprocess.run(words, env=self.environ, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def submit(self, script: str, options: Sequence[str]) -> str:
        """Submit ``script`` and return the number of the job."""
        done = subprocess.run(
            ["sbatch", "--parsable", *options], env=self.environ, input=script, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def values_of(self, job: str) -> dict[str, str]:
        """Return the values that SLURM shows for ``job``, such as ``JobState``."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return {name: value for name, _, value in (word.partition("=") for word in words)}


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Start a cluster whose files are in ``folder``, and stop it at the end of the context."""
    found = Cluster(folder)
    daemons = [
        [str(PROGRAMS / "sbin/slurmctld-wlm"), "-D", "-c"],
        [str(PROGRAMS / "sbin/slurmd-wlm"), "-D", "-d", str(PROGRAMS / "sbin/slurmstepd-wlm")],
    ]
    processes = [subprocess.Popen(each, env=found.environ, stderr=subprocess.DEVNULL) for each in daemons]

    def is_idle() -> bool:
        with suppress(AssertionError):
            return found.run("sinfo", "--noheader", "--format=%t") == "idle"
        return False

    try:
        wait_until(is_idle, lambda: "\n".join(each.read_text() for each in folder.glob("*.log")))
        yield found
        found.run("scancel", f"--user={getpass.getuser()}")
        wait_until(lambda: found.run("squeue", "--noheader") == "", lambda: found.run("squeue"))
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait()
