"""What a resume allocates."""

import torch

from roomier import checkpoint
from roomier.train.restore import places_on


def test_states_are_read_onto_their_device_and_step_counts_stay_on_the_host(tmp_path):
    state = {"optimizers": [{"type": "AdamW", "state": {"w": {"step": torch.tensor(3.0), "exp_avg": torch.ones(4)}}}]}
    checkpoint.save(tmp_path / "saved", state)
    [places] = places_on(torch.device("meta"), checkpoint.peek(tmp_path / "saved")["optimizers"])
    assert places["type"] == "AdamW"
    step, average = places["state"]["w"]["step"], places["state"]["w"]["exp_avg"]
    assert (step.device.type, step.dtype) == ("cpu", torch.float32)
    assert (average.device.type, average.shape) == ("meta", (4,))
