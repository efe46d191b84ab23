"""Saving one checkpoint on several ranks, and loading it on any number of ranks."""

import errno
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, empty

from roomier import checkpoint
from roomier.checkpoint import saving, tensor_file
from roomier.checkpoint.agree import all_ranks
from roomier.core.errors import CheckpointError
from tests.covering import covering, few
from tests.ranks.pool import RankFailed, RankPool

SHAPES = {"even": (8, 3), "uneven": (7, 5), "fewer_rows_than_ranks": (1, 4), "vector": (5,), "no_rows": (0, 3)}


def full_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {**tensors, "integers": torch.arange(9).reshape(3, 3), "bytes": torch.arange(7, dtype=torch.uint8)}


def plain_part() -> dict[str, Any]:
    return {"scalar": torch.tensor(2.5), "whole": torch.arange(6.0), "step": 3, "betas": (0.9, 0.95)}


def layout(name: str) -> tuple[Any, list[Any]]:
    """Return the mesh and the placements."""
    num_ranks = dist.get_world_size()
    if name == "hsdp":
        return init_device_mesh("cpu", (2, num_ranks // 2)), [Replicate(), Shard(0)]
    if name == "columns":
        return init_device_mesh("cpu", (num_ranks,)), [Shard(1)]
    return init_device_mesh("cpu", (num_ranks,)), [Replicate() if name == "replicated" else Shard(0)]


def cut(tensors: dict[str, torch.Tensor], name: str) -> dict[str, DTensor]:
    mesh, placements = layout(name)
    fits = {key: each for key, each in tensors.items() if name != "columns" or each.dim() > 1}
    return {key: distribute_tensor(each, mesh, placements) for key, each in fits.items()}


def places_like(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    if name == "whole":
        return {key: torch.zeros_like(each) for key, each in tensors.items()}
    mesh, placements = layout(name)
    return {
        key: empty(each.shape, dtype=each.dtype, device_mesh=mesh, placements=placements)
        for key, each in tensors.items()
    }


def save_sharded(path: Path, name: str) -> None:
    rank = dist.get_rank()
    module = cut(full_tensors(), name)
    # Unsharded tensors and other values are saved by rank 0.
    checkpoint.save(path, {"module": module, "rest": {**plain_part(), "of_rank": rank, "own": torch.tensor(rank)}})


def load_sharded(path: Path, name: str) -> None:
    tensor_file.CHUNK_BYTES = 24  # so that each tensor requires several reads
    stored = checkpoint.load(path, ranks=all_ranks())
    expected = {key: each for key, each in full_tensors().items() if key in stored["module"]}
    assert {**stored["module"]}.keys() == expected.keys()
    assert all(torch.equal(stored["module"][key], each) for key, each in expected.items())
    places = places_like(expected, name)
    loaded = checkpoint.load(path, into={"module": places}, ranks=all_ranks())
    for key, each in expected.items():
        assert loaded["module"][key] is places[key]
        place = places[key].full_tensor() if isinstance(places[key], DTensor) else places[key]
        assert torch.equal(place, each), key
    rest = loaded["rest"]
    assert torch.equal(rest["scalar"], torch.tensor(2.5))
    assert torch.equal(rest["whole"], torch.arange(6.0))
    assert (rest["step"], rest["betas"], rest["of_rank"], int(rest["own"])) == (3, (0.9, 0.95), 0, 0)


@pytest.mark.parametrize(
    ("saved_by", "saved_as"), few([(2, "sharded"), (4, "sharded"), (4, "hsdp"), (2, "replicated"), (2, "columns")])
)
def test_load_on_another_number_of_ranks(tmp_path: Path, on_ranks: RankPool, saved_by: int, saved_as: str) -> None:
    path = tmp_path / "c"
    on_ranks(saved_by, save_sharded, path, saved_as)
    for num_ranks, names in ((1, ["whole"]), (2, ["sharded", "whole"]), (4, ["hsdp", "sharded"])):
        on_ranks.each(num_ranks, load_sharded, [(path, name) for name in names])
    assert_each_element_is_stored_once(path)
    checkpoint.verify(path)


def assert_each_element_is_stored_once(path: Path) -> None:
    num_stored: dict[str, int] = {}
    for file_path in path.glob("*.safetensors"):
        with safe_open(file_path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                size = file.get_tensor(name).numel()
                num_stored[name] = num_stored.get(name, 0) + size
    tensors = full_tensors()
    for name, size in num_stored.items():
        key = name.removeprefix("module.")
        if key in tensors:
            assert size == tensors[key].numel(), name


@pytest.mark.more
def test_replicated_shards_are_written_in_turns(tmp_path: Path, on_ranks: RankPool) -> None:
    on_ranks(4, save_sharded, tmp_path / "c", "hsdp")
    writers = {path.name.split("-")[1] for path in (tmp_path / "c").glob("*.safetensors")}
    assert writers == {"00001", "00002", "00003", "00004"}, "both replicas of an HSDP model write some shards"


def save_with_a_tensor_of_rank_0_only(path: Path) -> None:
    mesh, placements = layout("replicated")
    weights = {name: distribute_tensor(torch.ones(2), mesh, placements) for name in "ab"}
    own = {"scores": torch.zeros(3)} if dist.get_rank() == 0 else {}
    checkpoint.save(path, {"callbacks": {"mine": own, "averaged": weights}})


@pytest.mark.more
def test_a_tensor_of_rank_0_only_does_not_change_the_writers_of_other_tensors(
    tmp_path: Path, on_ranks: RankPool
) -> None:
    on_ranks(2, save_with_a_tensor_of_rank_0_only, tmp_path / "c")
    stored = checkpoint.load(tmp_path / "c")["callbacks"]
    assert stored["mine"]["scores"].tolist() == [0, 0, 0]
    assert stored["averaged"]["a"].tolist() == stored["averaged"]["b"].tolist() == [1, 1]


@pytest.mark.more
def test_files_of_a_rank_stay_small(tmp_path: Path, on_ranks: RankPool) -> None:
    on_ranks(2, save_many_small_files, tmp_path / "c")
    names = sorted(path.name for path in (tmp_path / "c").glob("*.safetensors"))
    assert names == [f"shard-0000{r}-model-0000{i}-of-00003.safetensors" for r in (1, 2) for i in (1, 2, 3)]


def save_many_small_files(path: Path) -> None:
    saving._FILE_BYTES = 1000
    tensors = {f"w{index}": torch.full((200,), float(index)) for index in range(6)}
    checkpoint.save(path, {"m": cut(tensors, "sharded")})


def load_damaged(folder: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(folder / "b", ranks=all_ranks())
    messages = all_ranks().gather(str(caught.value))
    assert len(set(messages)) == 1
    assert "00002" in messages[0]
    assert f"Use {str(folder / 'a')!r}, the newest valid checkpoint next to it" in messages[0]


@pytest.mark.more
@pytest.mark.parametrize("harm", ["flip", "cut", "delete"])
def test_a_damaged_file_is_reported_on_all_ranks(tmp_path: Path, on_ranks: RankPool, harm: str) -> None:
    on_ranks.each(2, save_sharded, [(tmp_path / name, "sharded") for name in "ab"])
    (file,) = (tmp_path / "b").glob("shard-00002-*")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    if harm == "delete":
        file.unlink()
    else:
        file.write_bytes(data if harm == "flip" else data[:-1])
    for num_ranks in (1, 3):
        on_ranks(num_ranks, load_damaged, tmp_path)


def count_verified(path: Path) -> list[int]:
    from roomier.checkpoint.reading import TensorReader

    seen = []
    share = TensorReader._share

    def noted(reader: Any, ranks: Any) -> Any:
        verified = share(reader, ranks)
        seen.extend(verified)
        return verified

    TensorReader._share = noted  # type: ignore[method-assign]
    try:
        checkpoint.load(path, ranks=all_ranks())
    finally:
        TensorReader._share = share  # type: ignore[method-assign]
    return [file.name for file in seen]


@pytest.mark.more
def test_verification_is_shared_among_ranks(tmp_path: Path, on_ranks: RankPool) -> None:
    on_ranks(4, save_sharded, tmp_path / "c", "sharded")
    seen = [name for names in on_ranks(2, count_verified, tmp_path / "c") for name in names]
    assert sorted(seen) == sorted(path.name for path in (tmp_path / "c").glob("*.safetensors"))


# Failures while saving ----------------------------------------------------------------------------------------------


def save_and_fail(path: Path, failing: int, how: str) -> str:
    rank = dist.get_rank()
    state: dict[str, Any] = {"module": cut(full_tensors(), "sharded"), "progress": {"global_step": 2}}
    if rank == failing and how == "unstorable":
        state["rest"] = {"thing": object()}
    if rank == failing and how == "other tensors":
        del state["module"]["uneven"]
    if rank == failing and how == "full disk":
        saving.TensorFile.append = full_disk  # type: ignore[method-assign]
    if rank == failing and how == "bug":
        saving._write_file = lambda *_: 1 / 0  # type: ignore[assignment]
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(path, state)
    messages = all_ranks().gather(str(caught.value))
    assert len(set(messages)) == 1, messages
    return messages[0]


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(("how", "failing"), few(covering(["unstorable", "full disk", "bug", "other tensors"], [0, 1])))
def test_a_failure_on_one_rank_is_raised_on_all_and_keeps_the_old_checkpoint(
    tmp_path: Path, on_ranks: RankPool, failing: int, how: str
) -> None:
    on_ranks(2, save_sharded, tmp_path / "c", "sharded")
    for target in ("c", "new"):
        message = on_ranks(2, save_and_fail, tmp_path / target, failing, how)[0]
        assert ("rank 1" if how == "other tensors" else f"on rank {failing}") in message
    assert os.listdir(tmp_path) == ["c"]
    on_ranks(2, load_sharded, tmp_path / "c", "sharded")


def save_on_one_rank_only(path: Path) -> None:
    from roomier.core.ranks import Ranks

    state = {"module": cut(full_tensors(), "sharded")}
    if dist.get_rank() == 0:
        with pytest.raises(CheckpointError, match="have only some shards of the sharded tensors"):
            checkpoint.save(path, state, ranks=Ranks())
    dist.barrier()


@pytest.mark.more
def test_a_save_on_one_rank_of_a_group_is_rejected(tmp_path: Path, on_ranks: RankPool) -> None:
    on_ranks(2, save_on_one_rank_only, tmp_path / "c")
    assert os.listdir(tmp_path) == []


def save_one_twice(path: Path) -> None:
    mesh, placements = layout("replicated")
    state = {name: distribute_tensor(torch.ones(2), mesh, placements) for name in "ab"}
    saving._is_mine = lambda tensor, turn: turn == 2  # both ranks then write "b"
    with pytest.raises(CheckpointError, match=r"0 of 2 elements of m\.a'?: the ranks that save"):
        checkpoint.save(path, {"m": state})


@pytest.mark.more
def test_a_tensor_written_twice_does_not_replace_a_missing_tensor(tmp_path: Path, on_ranks: RankPool) -> None:
    on_ranks(2, save_one_twice, tmp_path / "c")
    assert os.listdir(tmp_path) == []


def save_until_killed(folder: Path, victim: int, after_s: float) -> None:
    if dist.get_rank() == victim:
        # The kernel sends the signal, so no Python thread has to run.
        signal.setitimer(signal.ITIMER_REAL, after_s)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    mesh, placements = layout("sharded")
    for step in range(1, 10_000):
        tensor = distribute_tensor(torch.full((201, 100), float(step)), mesh, placements, src_data_rank=None)
        state = {"module": {"w": tensor}, "progress": {"global_step": step}}
        checkpoint.save(folder / "last", state)
        checkpoint.save(folder / f"step={step % 3}", state)
        if dist.get_rank() == 0:
            (folder / "next").write_text(str(step))
            os.replace(folder / "next", folder / "reported")  # a kill can interrupt write_text


@pytest.mark.parametrize("victim", few([0, 1]))
def test_a_rank_killed_during_a_save_leaves_the_last_checkpoint(
    tmp_path: Path, on_ranks: RankPool, victim: int
) -> None:
    for attempt in range(4):
        began_s = time.monotonic()
        with pytest.raises(RankFailed):
            on_ranks(2, save_until_killed, tmp_path, victim, 0.2 + 0.13 * attempt)
        assert time.monotonic() - began_s < 60
        reported = tmp_path / "reported"
        found = checkpoint.find_last(tmp_path)
        if not reported.exists():
            continue
        assert found is not None
        for path in checkpoint.list_complete(tmp_path):
            state = checkpoint.load(path)
            assert (state["module"]["w"] == state["progress"]["global_step"]).all()
        # The report is empty if the rank was killed while it wrote the number.
        assert checkpoint.load(found)["progress"]["global_step"] >= int(reported.read_text() or 0)
        reported.unlink()
    assert checkpoint.find_last(tmp_path) is not None
