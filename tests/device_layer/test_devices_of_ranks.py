"""The device of each rank, and the environment variables that select devices."""

import pytest

from roomier import RoomierError, Trainer
from roomier.core.world import World
from roomier.launch.join import _device_index
from tests.device_layer.accelerators import have_accelerator

VARIABLES = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK", "mtia": "MTIA_VISIBLE_DEVICES"}
RANK_1 = World(1, 2, local_rank=1, local_size=2)


@pytest.fixture
def _without_variables(monkeypatch):
    for name in (*VARIABLES.values(), "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_without_variables")
@pytest.mark.parametrize("kind", VARIABLES)
def test_each_rank_has_the_device_of_its_local_rank(kind, monkeypatch):
    have_accelerator(monkeypatch, kind, count=2)
    assert _device_index(RANK_1, kind) == 1


@pytest.mark.usefixtures("_without_variables")
@pytest.mark.parametrize("kind", VARIABLES)
def test_a_launcher_can_make_one_device_visible_to_each_rank(kind, monkeypatch):
    have_accelerator(monkeypatch, kind, count=1)
    with pytest.raises(RoomierError, match=rf"devices=2: each rank requires a {kind} device, .* has only 1"):
        _device_index(RANK_1, kind)
    monkeypatch.setenv(VARIABLES[kind], "1")
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert _device_index(RANK_1, kind) == 0


@pytest.mark.parametrize(("accelerator", "kind"), [("auto", "xpu"), ("gpu", "cuda"), ("xpu", "xpu")])
def test_the_advice_for_selected_devices_names_the_variable(accelerator, kind, monkeypatch):
    have_accelerator(monkeypatch, kind, count=4)
    with pytest.raises(RoomierError, match=f"Use devices=2, .* variable {VARIABLES[kind]}"):
        Trainer(accelerator=accelerator, strategy="ddp", devices=[1, 3])
    assert Trainer(accelerator=accelerator, strategy="ddp", logger=False).num_devices == 4
