"""Memory allocations during a resume."""

import torch
from torch.optim import AdamW

from roomier import checkpoint
from roomier.checkpoint import TensorSpec
from roomier.engine.optimizer_state import optimizer_state, parameter_names, state_places


def test_states_are_read_onto_their_device_and_step_counts_stay_on_the_host(tmp_path):
    module = torch.nn.Linear(4, 1, bias=False, device="meta")
    names = parameter_names(module)
    saved = optimizer_state(optimizer := AdamW(module.parameters()), names)
    saved["state"] = {"weight": {"step": torch.tensor(3.0), "exp_avg": torch.ones(1, 4)}}
    checkpoint.save(tmp_path / "saved", {"optimizers": [saved]})
    [stored] = checkpoint.peek(tmp_path / "saved")["optimizers"]
    places = state_places(
        optimizer, stored, names, is_spec=lambda each: isinstance(each, TensorSpec), unneeded=checkpoint.UNREAD
    )
    assert places["type"] == "AdamW"
    step, average = places["state"]["weight"]["step"], places["state"]["weight"]["exp_avg"]
    assert (step.device.type, step.dtype) == ("cpu", torch.float32)
    assert (average.device.type, average.shape) == ("meta", (1, 4))
