"""A small run that fails as its arguments specify: ``WHAT RANK [Trainer keywords as JSON]``.

The folder ``NOTES`` receives an empty file for each process, which is named after the process id, a file with the
sockets of each rank in the second step (address, port, status), and a file when the rank fails.
"""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import psutil
import torch

import roomier
from roomier.launch import heartbeat
from roomier.launch.records import Activity

WHAT, RANK = sys.argv[1], int(sys.argv[2])
NOTES = Path(os.environ["NOTES"])
KEYWORDS = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}


def go_wrong(what: str) -> None:
    if what != WHAT or os.environ.get("RANK", "0") != str(RANK):
        return
    (NOTES / "gone-wrong").touch()
    if what.endswith("raises"):
        raise ValueError(f"rank {RANK} cannot continue")
    if what.endswith("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if what.endswith("leaves"):
        sys.exit(0)
    if what.endswith("leaves badly"):
        sys.exit(7)
    if what.endswith("vanishes"):
        os._exit(0)
    if what.endswith("out of memory"):  # of a control group
        Path(os.environ["CONTROL_GROUP"], "cgroup.procs").write_text(str(os.getpid()))
        kept = [b"x" * 2**24 for _ in range(200)]
        raise AssertionError(f"{sum(map(len, kept))} bytes were allocated beyond the limit")
    if what.endswith("starves"):
        resource.setrlimit(resource.RLIMIT_AS, (2**28, 2**28))
        bytearray(2**26)
    if what.endswith("sleeps"):
        time.sleep(600)


def wait_for_partition() -> None:
    """Wait until each rank has read that the other rank is in a step, and until the test has disconnected the ranks."""
    thread, rank = heartbeat._heartbeat, os.environ["RANK"]

    def is_peer_in_step() -> bool:
        seen = thread._judge._seen.get(1) if rank == "0" else None
        record = thread._zero if seen is None else seen.record
        return record is not None and record.position.activity is Activity.STEP

    while not is_peer_in_step():
        time.sleep(0.02)
    (NOTES / f"in-step-{rank}").touch()
    while not (NOTES / "disconnected").exists():
        time.sleep(0.02)


def note_sockets() -> None:
    sockets = [(each.laddr.ip, each.laddr.port, each.status) for each in psutil.Process().net_connections("inet")]
    (NOTES / f"sockets-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(sockets))


class Model(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            note_sockets()
            go_wrong("step raises")
            go_wrong("step killed")
            go_wrong("step leaves")
            go_wrong("step leaves badly")
            go_wrong("step vanishes")
            go_wrong("step out of memory")
            go_wrong("step sleeps")
            go_wrong("step starves")
        if WHAT == "partition" and batch_idx == 3:
            wait_for_partition()
        if WHAT == "all raise" and batch_idx == 1:
            (NOTES / "gone-wrong").touch()
            raise ValueError("no rank can continue")
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def main() -> None:
    (NOTES / f"{os.getpid()}.pid").touch()
    go_wrong("start raises")
    go_wrong("start sleeps")
    go_wrong("start killed")
    go_wrong("start leaves")
    torch.manual_seed(0)
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = roomier.Trainer(**{"strategy": "zero2", "max_steps": 4, **quiet, **KEYWORDS})
    model = Model()
    trainer.fit(model, torch.utils.data.DataLoader(torch.ones(32, 8), batch_size=2))
    go_wrong("end raises")
    world = trainer.world
    values = [world.rank, world.size, world.local_rank, world.local_size, world.node_rank, trainer.global_step]
    sys.stdout.write(f"ranks {json.dumps(values)}\n")


if __name__ == "__main__":
    main()
