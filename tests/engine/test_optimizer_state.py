"""Loading of optimizer states."""

import torch
from torch import nn

from roomier.engine.optimizer_state import load_optimizer, optimizer_state, parameter_names


def test_a_nested_state_is_on_the_device_of_its_parameter():
    """LBFGS stores lists of tensors. The meta device represents a device that differs from the device of the
    checkpoint."""
    net = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = net(torch.ones(4, 2)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    saved = optimizer_state(optimizer, parameter_names(net))
    elsewhere = nn.Linear(2, 1, device="meta")
    other = torch.optim.LBFGS(elsewhere.parameters(), max_iter=3)
    load_optimizer(other, saved, parameter_names(elsewhere))
    [state] = other.state.values()
    assert state["old_dirs"]
    assert {tensor.device.type for tensor in (state["d"], *state["old_dirs"], *state["old_stps"])} == {"meta"}
    assert state["n_iter"] == saved["state"]["weight"]["n_iter"]
