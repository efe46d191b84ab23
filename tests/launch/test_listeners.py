"""Sockets of runs on a single machine, which other machines cannot reach."""

import os
import socket
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

import roomier
from benchmarks.rank_processes import run_on_ranks
from roomier.core.errors import RoomierError
from roomier.core.loopback import is_loopback, keep_on_loopback
from roomier.core.world import World
from roomier.launch.meet import open_store
from tests.ranks.pool import RankPool

pytestmark = pytest.mark.more


@dataclass(frozen=True)
class Socket:
    """Local end of a TCP or UDP socket in a process."""

    process: str
    address: str
    port: int
    listens: bool

    @property
    def is_on_loopback(self) -> bool:
        address = ip_address(self.address)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def open_sockets() -> list[Socket]:
    """Return the sockets of this process and of its child processes."""
    own = psutil.Process()
    return [
        Socket(each.name(), one.laddr.ip, one.laddr.port, one.status == psutil.CONN_LISTEN)
        for each in (own, *own.children(recursive=True))
        for one in each.net_connections(kind="inet")
        if one.laddr
    ]


class Model(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


class Look(roomier.Callback):
    """Callback that records the sockets in the second step, while the process groups and the loader's workers exist."""

    def __init__(self) -> None:
        self.sockets: list[Socket] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.sockets = open_sockets()


def train_with_each_strategy(root: Path) -> list[Socket]:
    """Return the open sockets after training with all strategies. Groups of earlier runs stay open."""
    look = Look()
    for strategy in ("ddp", "zero1", "zero2", "zero3", {"name": "hsdp", "shard_size": 2}):
        trainer = roomier.Trainer(
            strategy=strategy,
            devices=4,
            accelerator="cpu",
            max_steps=2,
            logger=False,
            callbacks=[look, roomier.callbacks.ModelCheckpoint(every_n_train_steps=1, async_save=True)],
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=root,
        )
        trainer.fit(Model(), DataLoader(torch.ones(16, 4), batch_size=2, num_workers=strategy == "ddp"))
    return look.sockets


def test_every_socket_of_a_run_is_on_the_loopback(on_ranks: RankPool, tmp_path: Path) -> None:
    by_rank = on_ranks(4, train_with_each_strategy, tmp_path, joins=False)
    assert [each for sockets in by_rank for each in sockets if not each.is_on_loopback] == []
    # Each rank listens for the default group, for the groups of the strategies, and for the group of the background
    # save.
    assert all(sum(each.listens for each in sockets) >= 2 for sockets in by_rank)


@pytest.mark.parametrize(
    ("address", "local_size"),
    [("127.0.0.1", 2), ("localhost", 1), ("::1", 1), ("name-of-this-machine", 2)],
)
def test_the_store_of_a_single_machine_listens_on_the_loopback(address: str, local_size: int) -> None:
    world = World(0, 2, local_size=local_size)
    before = set(open_sockets())
    store = open_store(world, {"MASTER_ADDR": address, "MASTER_PORT": "0"}, 20.0)
    opened = set(open_sockets()) - before
    assert opened
    assert all(each.is_on_loopback for each in opened)
    assert (store.host, store.port) in {(each.address, each.port) for each in opened if each.listens}


def test_a_port_that_is_taken_is_reported_with_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        with pytest.raises(RoomierError, match=r"cannot listen on this port of 127\.0\.0\.1: .*in use"):
            open_store(World(0, 2, local_size=2), environ, 20.0)


def test_host_names_are_not_loopback_addresses() -> None:
    assert [is_loopback(each) for each in ("127.0.1.1", "node1", "192.0.2.7")] == [True, False, False]


def test_interfaces_of_the_user_are_kept() -> None:
    environ = {"GLOO_SOCKET_IFNAME": "eth7"}
    keep_on_loopback(environ)
    [loopback] = {
        name for name, each in psutil.net_if_addrs().items() if any(one.address == "127.0.0.1" for one in each)
    }
    assert environ == {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": loopback}


def test_processes_of_a_measurement_use_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    folder = str(Path(__file__).parent / "programs")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]))
    found = run_on_ranks("environment_of_rank", 1, {})
    assert found["GLOO_SOCKET_IFNAME"].startswith("lo")
