"""Errors about arguments from 2020 and 2021 show the current call with the given values, and this call works."""

from typing import Any

import pytest

import roomier
from roomier.core.errors import RoomierError


class DeepSpeedPlugin:
    """Replacement for the former plugin."""

    def __init__(self, **settings: Any) -> None:
        vars(self).update(settings)


SPELLED = [
    ({"gpus": 8}, "accelerator='gpu', devices=8, strategy='ddp'"),
    ({"gpus": 1}, "accelerator='gpu', devices=1"),
    ({"gpus": 0}, "accelerator='cpu'"),
    ({"gpus": -1}, "accelerator='gpu', devices='auto', strategy='ddp'"),
    ({"gpus": "2"}, "accelerator='gpu', devices=2, strategy='ddp'"),
    ({"gpus": 8, "num_nodes": 32}, "num_nodes=32, accelerator='gpu', devices=8, strategy='ddp'"),
    ({"gpus": 8, "accelerator": "ddp"}, "accelerator='gpu', devices=8, strategy='ddp'"),
    ({"accelerator": "ddp"}, "strategy='ddp'"),
    ({"accelerator": "ddp_cpu", "num_processes": 2}, "strategy='ddp', accelerator='cpu', devices=2"),
    ({"plugins": ["ddp", object]}, "strategy='ddp'"),
    (
        {"gpus": 8, "accelerator": "ddp", "plugins": "ddp_sharded"},
        "accelerator='gpu', devices=8, strategy='zero2'",
    ),
    (
        {"gpus": 4, "plugins": ["ddp_sharded"], "precision": 16},
        "precision='16-mixed', accelerator='gpu', devices=4, strategy='zero2'",
    ),
    (
        {"gpus": 8, "plugins": DeepSpeedPlugin(stage=3, cpu_offload=True, partition_activations=True)},
        "accelerator='gpu', devices=8, strategy='zero3', offload={'optimizer_states': 'cpu'},"
        " activation_checkpointing='full'",
    ),
    ({"tpu_cores": 8}, "accelerator='tpu', devices=8, strategy='ddp'"),
    ({"tpu_cores": 1}, "accelerator='tpu', devices=1"),
    ({"auto_lr_finder": True, "max_epochs": 10}, "auto_lr_find=True"),
]


@pytest.mark.parametrize(("flags", "today"), SPELLED, ids=[str(flags)[:60] for flags, _ in SPELLED])
def test_the_error_shows_the_current_call(flags: dict[str, Any], today: str) -> None:
    with pytest.raises(RoomierError) as caught:
        roomier.Trainer(**flags)
    assert f"Use Trainer({today})." in str(caught.value)
    assert caught.value.received == flags[caught.value.field]


@pytest.mark.parametrize("today", [today for _, today in SPELLED if "gpu" not in today])
def test_the_current_call_is_accepted(today: str) -> None:
    trainer = eval(f"roomier.Trainer({today})", {"roomier": roomier})
    assert isinstance(trainer, roomier.Trainer)


@pytest.mark.parametrize(
    ("flags", "remark"),
    [
        ({"gpus": [0, 2]}, "CUDA_VISIBLE_DEVICES=0,2"),
        ({"gpus": "0, 2"}, "CUDA_VISIBLE_DEVICES=0,2"),
        ({"tpu_cores": 8}, "accelerator='tpu' requires the package torch-tpu"),
        ({"plugins": DeepSpeedPlugin(stage=2, cpu_offload=True)}, "offload={'optimizer_states': 'cpu'}"),
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
def test_the_error_has_remarks(flags: dict[str, Any], remark: str) -> None:
    with pytest.raises(RoomierError) as caught:
        roomier.Trainer(**flags)
    assert remark in str(caught.value)


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
