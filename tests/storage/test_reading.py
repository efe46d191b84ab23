"""Reading from a server: the bytes on the wire, faults of the server and of the network, and errors."""

import os
import random
import socket
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from roomier import checkpoint
from roomier.checkpoint.agree import all_ranks
from roomier.core.errors import RoomierError
from tests.ranks.pool import RankPool
from tests.storage.servers import TEMPORARY, Fault, Proxy, Request, proxied, s3_environment

pytestmark = pytest.mark.services

SHAPE = (1024, 2048)


def sharded(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return {name: distribute_tensor(torch.full(SHAPE, value), mesh, [Shard(0)]) for name in ("a", "b")}


def save_sharded(folder: Path) -> None:
    checkpoint.save(folder, {"weights": sharded(3.0)})


def load_sharded(address: str, urls: list[str]) -> bool:
    os.environ.update(s3_environment(urls[torch.distributed.get_rank()]))
    into = sharded(0.0)
    checkpoint.load(address, into={"weights": into}, empty=["weights"], ranks=all_ranks())
    return all(bool((each.to_local() == 3.0).all()) for each in into.values())


def upload(folder: Path, address: str) -> None:
    system, path = fsspec.url_to_fs(address, use_listings_cache=False)
    system.put(f"{folder}/", f"{path}/", recursive=True)


def test_each_rank_reads_only_its_shard(tmp_path: Path, s3: Proxy, on_ranks: RankPool) -> None:
    """A proxy for each rank counts the bytes of its tensor files."""
    on_ranks(2, save_sharded, tmp_path / "saved")
    upload(tmp_path / "saved", "s3://bucket/saved")
    num_bytes = sum(path.stat().st_size for path in (tmp_path / "saved").glob("*.safetensors"))
    for num_ranks in (2, 3):  # the shards of three ranks do not match the files
        with proxied(s3.upstream) as first, proxied(s3.upstream) as second, proxied(s3.upstream) as third:
            proxies = [first, second, third][:num_ranks]
            assert all(on_ranks(num_ranks, load_sharded, "s3://bucket/saved", [each.url for each in proxies]))
            shares = [sum(each.num_sent for each in proxy.requests if each.is_read_of_tensors) for proxy in proxies]
        assert max(shares) / num_bytes < {2: 0.55, 3: 0.75}[num_ranks], shares
        assert sum(shares) / num_bytes < {2: 1.1, 3: 1.5}[num_ranks], shares


def test_temporary_faults_are_survived(tmp_path: Path, s3: Proxy) -> None:
    """Every fifth request fails in one of five ways, and every checkpoint that is found and loaded is correct."""
    state = {"weights": {"w": torch.randn(1500, 1000)}, "progress": {"global_step": 1}}
    for step in (1, 2):
        checkpoint.save(tmp_path / "runs" / f"step={step}", {**state, "progress": {"global_step": step}})
    upload(tmp_path / "runs", "s3://bucket/runs")
    draw = random.Random(0)
    seen: list[Fault] = []

    def fault_of(request: Request, index: int) -> Fault | None:
        if index % 5 != 4:
            return None
        seen.append(draw.choice(TEMPORARY))
        return seen[-1]

    s3.fault_of = fault_of
    while len(seen) < 10:
        found = checkpoint.find_last("s3://bucket/runs")
        assert str(found) == "s3://bucket/runs/step=2"
        assert torch.equal(checkpoint.load(found)["weights"]["w"], state["weights"]["w"])
    assert set(seen) == set(TEMPORARY)


def test_an_outage_is_not_a_missing_checkpoint(s3: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An error that a retry does not solve is raised: the search must not return an older checkpoint, or none."""
    for step in (1, 2):
        checkpoint.save(tmp_path / "runs" / f"step={step}", {"progress": {"global_step": step}})
    upload(tmp_path / "runs", "s3://bucket/runs")

    s3.fault_of = lambda request, index: "403" if "step%3D2/run.json" in request.path else None
    with pytest.raises(RoomierError, match=r"step=2/run\.json.*denied access.*Check the credentials"):
        checkpoint.find_last("s3://bucket/runs")
    s3.clear()
    with pytest.raises(RoomierError, match=r"s3://absent/runs.*bucket does not exist.*Check the name of the bucket"):
        checkpoint.find_last("s3://absent/runs")
    with pytest.raises(RoomierError, match=r"s3://bucket/absent.*is not an existing folder"):
        checkpoint.load("s3://bucket/absent")

    with socket.socket() as closed:  # a port on which no server listens
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        began_s = time.monotonic()
        with pytest.raises(RoomierError, match=r"cannot be read \(Could not connect.*Check the network"):
            checkpoint.find_last("s3://bucket/runs")
        assert time.monotonic() - began_s < 60
