"""BatchNorm with accumulated gradients: statistics are computed for each micro-batch, and a fit prints a notice."""

import pytest
import torch
from torch import nn

import roomier

NOTICE = "accumulated gradients differ from the gradients of the full batch"


class Net(roomier.Module):
    def __init__(self, norm):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        return self.body(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(make_trainer, norm, **keywords):
    make_trainer(max_steps=2, **keywords).fit(Net(norm), [torch.randn(3, 4) for _ in range(4)])


def test_notice_is_printed_once_with_the_first_module(make_trainer, capsys):
    fit(make_trainer, nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4)), accumulate_grad_batches=2)
    message = capsys.readouterr().err
    assert message.count(NOTICE) == 1
    assert "2 BatchNorm modules (the first: body.1.0)" in message


@pytest.mark.parametrize(
    ("norm", "num_micro_batches"),
    [(nn.BatchNorm1d(4), 1), (nn.BatchNorm1d(4).eval(), 2), (nn.LayerNorm(4), 2)],
    ids=["one micro-batch", "evaluation mode", "LayerNorm"],
)
def test_no_notice_if_statistics_are_exact(make_trainer, capsys, norm, num_micro_batches):
    fit(make_trainer, norm, accumulate_grad_batches=num_micro_batches)
    assert NOTICE not in capsys.readouterr().err
