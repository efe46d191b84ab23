"""Loaded values are equal to saved values. Loading can fill tensors in place, and never executes code."""

import os
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from roomier import checkpoint
from roomier.checkpoint import TensorSpec
from roomier.checkpoint.tree import DTYPES, leaves
from roomier.core.errors import CheckpointError


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).tolist())


def random_bytes_as(dtype: torch.dtype, num_elements: int = 24) -> torch.Tensor:
    itemsize = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (num_elements * itemsize,), dtype=torch.uint8)
    return raw.view(dtype)


def small_state(step: int = 1) -> dict:
    return {
        "module": {"lin.weight": torch.full((3, 2), float(step)), "lin.bias": torch.zeros(3)},
        "optimizer": {"state": {0: {"exp_avg": torch.arange(6.0).reshape(3, 2), "step": torch.tensor(4.0)}}},
        "progress": {"global_step": step, "best": float("inf"), "betas": (0.9, 0.95)},
    }


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_is_bit_identical(tmp_path, dtype):
    tensor = random_bytes_as(dtype)
    checkpoint.save(tmp_path / "c", {"x": tensor, "two_d": tensor.reshape(4, 6)})
    loaded = checkpoint.load(tmp_path / "c")
    assert loaded["x"].dtype == dtype
    assert loaded["two_d"].shape == (4, 6)
    assert bits(loaded["x"]) == bits(loaded["two_d"]) == bits(tensor)


def awkward_tensors() -> dict[str, torch.Tensor]:
    base = torch.randn(6, 4)
    return {
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0),
        "empty_2d": torch.empty(3, 0, 2, dtype=torch.int64),
        "whole": base,
        "tied": base,
        "row_view": base[2:4],
        "column_view": base[:, 1],
        "transposed": base.t(),
        "expanded": torch.tensor([7.0]).expand(5),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugated": torch.randn(4, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "buffer": torch.nn.Buffer(torch.randn(2)),
        "needs_grad": torch.randn(2, requires_grad=True) * 2,
    }


def test_unusual_tensors_are_bit_identical_and_unchanged(tmp_path):
    tensors = awkward_tensors()
    before = {name: bits(tensor.resolve_conj()) for name, tensor in tensors.items()}
    checkpoint.save(tmp_path / "c", {"all_in_one_file": tensors})
    loaded = checkpoint.load(tmp_path / "c")["all_in_one_file"]
    assert list(loaded) == list(tensors)
    for name, tensor in loaded.items():
        assert tensor.shape == tensors[name].shape, name
        assert tensor.dtype == tensors[name].dtype, name
        assert bits(tensor) == before[name], name
        assert bits(tensors[name].resolve_conj()) == before[name], name
    assert loaded["whole"].data_ptr() != loaded["tied"].data_ptr()


def test_tied_tensors_are_stored_one_time_and_fill_both_targets(tmp_path):
    shared = torch.randn(1000)
    state = {"m": {"first": shared, "second": shared, "slice": shared[:500]}, "n": [torch.nn.Parameter(shared)]}
    checkpoint.save(tmp_path / "c", state)
    num_bytes = sum(path.stat().st_size for path in (tmp_path / "c").glob("*.safetensors"))
    assert 6000 < num_bytes < 7000
    into = {"m": {name: torch.zeros_like(tensor) for name, tensor in state["m"].items()}}
    loaded = checkpoint.load(tmp_path / "c", into=into)
    assert all(torch.equal(loaded["m"][name], tensor) for name, tensor in state["m"].items())
    assert torch.equal(loaded["n"][0], shared)
    assert loaded["m"]["second"] is into["m"]["second"]
    only = checkpoint.load(tmp_path / "c", only=("n",))
    assert torch.equal(only["n"][0], shared)


def test_dcp_can_read_the_files(tmp_path):
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    saved = torch.randn(3, 2)
    checkpoint.save(tmp_path / "c", {"m": {"w": saved}})
    target = {"m.w": torch.zeros(3, 2)}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        load(target, storage_reader=HuggingFaceStorageReader(str(tmp_path / "c")), no_dist=True)
    assert torch.equal(target["m.w"], saved)


@pytest.mark.parametrize("state", [{}, {"a": 1}, {"a": {}, "b": [], "c": ()}], ids=str)
def test_a_state_without_tensors(tmp_path, state):
    checkpoint.save(tmp_path / "c", state)
    assert os.listdir(tmp_path / "c") == ["run.json"]
    assert checkpoint.load(tmp_path / "c") == state


def test_large_tensors_are_stored_in_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr("roomier.checkpoint.saving._FILE_BYTES", 1000)
    state = {"m": {f"w{i}": torch.randn(100) for i in range(9)}}
    checkpoint.save(tmp_path / "c", state)
    assert len(list((tmp_path / "c").glob("*.safetensors"))) == 5
    loaded = checkpoint.load(tmp_path / "c")
    assert all(torch.equal(loaded["m"][name], tensor) for name, tensor in state["m"].items())


def test_load_fills_tensors_in_place(tmp_path):
    state = small_state(step=3)
    checkpoint.save(tmp_path / "c", state)
    module = torch.nn.Sequential()
    module.lin = torch.nn.Linear(2, 3)
    into = {"module": module.state_dict(), "progress": {"global_step": 99}}
    loaded = checkpoint.load(tmp_path / "c", into=into)
    assert loaded["module"]["lin.weight"] is into["module"]["lin.weight"]
    assert torch.equal(module.lin.weight, state["module"]["lin.weight"])
    assert torch.equal(module.lin.bias, state["module"]["lin.bias"])
    assert loaded["progress"] == state["progress"]
    assert into["progress"] == {"global_step": 99}
    exp_avg = loaded["optimizer"]["state"][0]["exp_avg"]
    assert torch.equal(exp_avg, state["optimizer"]["state"][0]["exp_avg"])


def test_load_into_parameters_and_strided_views(tmp_path):
    saved = torch.randn(4, 3)
    checkpoint.save(tmp_path / "c", {"m": {"w": saved, "v": saved + 1}})
    parameter = torch.nn.Parameter(torch.zeros(4, 3))
    memory = torch.zeros(3, 4)
    checkpoint.load(tmp_path / "c", into={"m": {"w": parameter, "v": memory.t()}})
    assert torch.equal(parameter, saved)
    assert torch.equal(memory, (saved + 1).t())
    assert parameter.requires_grad
    assert parameter.is_leaf


def test_only_reads_the_named_entries(tmp_path):
    state = small_state()
    checkpoint.save(tmp_path / "c", state)
    for file in (tmp_path / "c").glob("*.safetensors"):
        data = file.read_bytes()
        if b"exp_avg" in data:
            file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    into = {"module": {name: torch.empty_like(w) for name, w in state["module"].items()}, "other": torch.ones(1)}
    loaded = checkpoint.load(tmp_path / "c", into=into, only=("module",))
    assert list(loaded) == ["module"]
    assert torch.equal(into["module"]["lin.weight"], state["module"]["lin.weight"])
    with pytest.raises(CheckpointError, match="its checksum does not match the record"):
        checkpoint.load(tmp_path / "c", only=("optimizer",))


def test_only_rejects_unknown_keys(tmp_path):
    checkpoint.save(tmp_path / "c", small_state())
    with pytest.raises(CheckpointError, match=r"only='modul': is not in the checkpoint. Did you mean 'module'"):
        checkpoint.load(tmp_path / "c", only=("modul",))
    with pytest.raises(CheckpointError, match=r"Pass only=\('module',\)"):
        checkpoint.load(tmp_path / "c", only="module")


def _rename_weight(into):
    into["module"]["lin.gewicht"] = into["module"].pop("lin.weight")


def _reshape_weight(into):
    into["module"]["lin.weight"] = torch.zeros(2, 3)


def _retype_weight(into):
    into["module"]["lin.weight"] = torch.zeros(3, 2, dtype=torch.bfloat16)


def _to_meta(into):
    into["module"]["lin.weight"] = torch.zeros(3, 2, device="meta")


def _drop_weight(into):
    del into["module"]["lin.weight"]


def _add_entry(into):
    into["ema"] = {"w": torch.zeros(1)}


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (
            _rename_weight,
            r"missing in the checkpoint: state\['module'\]\['lin.gewicht'\]; "
            r"only in the checkpoint: state\['module'\]\['lin.weight'\]",
        ),
        (
            _reshape_weight,
            r"state\['module'\]\['lin.weight'\] is float32\[3, 2\] in the checkpoint, float32\[2, 3\] here",
        ),
        (_retype_weight, r"is float32\[3, 2\] in the checkpoint, bfloat16\[3, 2\] here"),
        (_to_meta, r"is float32\[3, 2\] in the checkpoint, float32\[3, 2\] on meta here"),
        (_drop_weight, r"only in the checkpoint: state\['module'\]\['lin.weight'\]"),
        (_add_entry, r"missing in the checkpoint: state\['ema'\]\['w'\]"),
    ],
)
def test_the_checkpoint_of_another_model_is_rejected_without_changes(tmp_path, change, difference):
    checkpoint.save(tmp_path / "c", small_state())
    into = {"module": {"lin.weight": torch.full((3, 2), -1.0), "lin.bias": torch.full((3,), -1.0)}}
    change(into)
    before = [(path, tensor.clone()) for path, tensor in leaves(into, torch.Tensor)]
    with pytest.raises(CheckpointError, match=f"belongs to another model: .*{difference}"):
        checkpoint.load(tmp_path / "c", into=into)
    for (_, now), (_, then) in zip(leaves(into, torch.Tensor), before, strict=True):
        assert now.is_meta or torch.equal(now, then)


def test_a_long_list_of_mismatches_is_shortened(tmp_path):
    checkpoint.save(tmp_path / "c", {"m": {f"w{i}": torch.ones(1) for i in range(20)}})
    with pytest.raises(CheckpointError, match=r"and 14 more") as caught:
        checkpoint.load(tmp_path / "c", into={"m": {"w0": torch.ones(1)}})
    assert len(str(caught.value)) < 600


def test_no_file_is_written_if_the_state_cannot_be_saved(tmp_path):
    with pytest.raises(CheckpointError, match=r"state\['f'\]"):
        checkpoint.save(tmp_path / "run" / "c", {"w": torch.ones(1), "f": print})
    assert os.listdir(tmp_path) == []


def test_peek_returns_shapes_without_reading_tensors(tmp_path):
    checkpoint.save(tmp_path / "c", small_state())
    for file in (tmp_path / "c").glob("*.safetensors"):
        file.unlink()
    seen = checkpoint.peek(tmp_path / "c")
    assert seen["module"]["lin.weight"] == TensorSpec((3, 2), torch.float32)
    assert seen["optimizer"]["state"][0]["step"] == TensorSpec((), torch.float32)
    assert seen["progress"] == {"global_step": 1, "best": float("inf"), "betas": (0.9, 0.95)}


class Bomb:
    """Object whose unpickling creates a folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_no_planted_code_is_executed(tmp_path):
    pickle.loads(pickle.dumps(Bomb(str(tmp_path / "control"))))
    assert (tmp_path / "control").is_dir()

    folder = tmp_path / "c"
    checkpoint.save(folder, small_state())
    payload = pickle.dumps(Bomb(str(tmp_path / "exploded")))
    for name in (".metadata", "__0.metadata", "__0_0.distcp", "run.pkl", "pytorch_model.bin", "run.pt"):
        (folder / name).write_bytes(payload)
    checkpoint.verify(folder)
    checkpoint.peek(folder)
    assert checkpoint.find_last(tmp_path) == folder
    checkpoint.load(folder, into={"module": small_state()["module"]})
    checkpoint.save(folder, small_state(2))
    assert not (tmp_path / "exploded").exists()


def test_a_planted_tensor_file_is_rejected(tmp_path):
    folder = tmp_path / "c"
    checkpoint.save(folder, small_state())
    good = next(folder.glob("*.safetensors"))
    (folder / "shard-00009-model-00001-of-00001.safetensors").write_bytes(good.read_bytes())
    with pytest.raises(CheckpointError, match=r"shard-00009.* is not part of the checkpoint"):
        checkpoint.load(folder)


def test_one_rank_of_a_process_group_saves_and_loads_sharded_tensors(tmp_path):
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        full = torch.randn(6, 2)
        checkpoint.save(tmp_path / "c", {"w": distribute_tensor(full, mesh, [Shard(0)])})
        target = distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)])
        loaded = checkpoint.load(tmp_path / "c", into={"w": target})["w"]
        assert isinstance(loaded, DTensor)
        assert torch.equal(loaded.full_tensor(), full)
    finally:
        dist.destroy_process_group()
    assert torch.equal(checkpoint.load(tmp_path / "c")["w"], full)


@pytest.mark.more
def test_saving_needs_no_additional_memory(tmp_path):
    program = """
import sys, torch
from roomier import checkpoint
def peak_kib():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
checkpoint.save(sys.argv[1], {"warm": torch.ones(1)})
state = {"m": {f"w{i}": torch.ones(2**21) for i in range(32)}}
before = peak_kib()
checkpoint.save(sys.argv[1], state)
print((peak_kib() - before) * 1024)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "c")], capture_output=True, text=True, check=True
    )
    state_bytes = 32 * 2**23
    assert int(done.stdout) < 4 * 2**20 < state_bytes / 32
