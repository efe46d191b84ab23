"""Errors about arguments of Lightning from 2020 and 2021 name the current argument."""

from typing import Any

import pytest

import roomier
from roomier.core.errors import RoomierError


@pytest.mark.parametrize(
    ("flags", "action"),
    [
        ({"gpus": 8}, "Use accelerator='gpu' and devices=N"),
        ({"gpus": [0, 2], "accelerator": "ddp"}, "CUDA_VISIBLE_DEVICES"),
        ({"tpu_cores": 8}, "Use accelerator='tpu' and devices=N. The package torch-tpu is required"),
        ({"auto_lr_finder": True, "max_epochs": 10}, "Use auto_lr_find=True"),
        ({"accelerator": "ddp"}, "Use strategy='ddp'"),
        ({"accelerator": "ddp_cpu"}, "Use strategy='ddp' and accelerator='cpu'"),
        ({"plugins": "ddp_sharded"}, "Pass it as strategy"),
        ({"plugins": [{"zero_optimization": {"stage": 2}}]}, "Pass it as strategy"),
        ({"plugins": [object()]}, "Use the argument that replaces the plugin"),
        (
            {"devices": [1, 3], "strategy": "ddp"},
            "Use devices=2, and select the devices with the environment variable CUDA_VISIBLE_DEVICES",
        ),
        (
            {"devices": "1,3", "strategy": "ddp"},
            "Use devices=2, and select the devices with the environment variable CUDA_VISIBLE_DEVICES",
        ),
    ],
)
def test_the_error_names_the_replacement(flags: dict[str, Any], action: str) -> None:
    with pytest.raises(RoomierError) as caught:
        roomier.Trainer(**flags)
    assert action in str(caught.value)
    assert str(caught.value.field).endswith(next(iter(flags))) or "plugins" in flags


def test_the_name_of_a_former_plugin_is_accepted_as_the_strategy() -> None:
    assert roomier.Trainer(strategy="ddp_sharded").plan.parallel.strategy == "zero2"


@pytest.mark.parametrize("devices", [[0, 1], (0, 1), "0,1", "2", 2])
def test_a_list_of_the_first_devices_is_their_number(devices: Any) -> None:
    assert roomier.Trainer(accelerator="cpu", strategy="ddp", devices=devices).num_devices == 2


def test_minus_one_is_all_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert roomier.Trainer(accelerator="cpu", strategy="ddp", devices=-1).num_devices == 1
    assert "starts one process on this machine" in capsys.readouterr().err


def test_values_that_equal_the_behavior_are_accepted() -> None:
    roomier.Trainer(sync_batchnorm=False, use_distributed_sampler=True, plugins=None, barebones=False)
    with pytest.raises(RoomierError, match="convert_sync_batchnorm"):
        roomier.Trainer(sync_batchnorm=True, devices=2)
