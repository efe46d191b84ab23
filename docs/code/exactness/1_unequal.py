import torch
from torch import nn

import roomier

roomier.seed_everything(0)
head = nn.Linear(8, 4)
inputs = torch.randn(32, 8)
labels = torch.randint(0, 4, (32,))
labels[:14] = -100  # the first micro-batch contains only 2 tokens, the second one 16
micro_batches = list(zip(inputs.split(16), labels.split(16), strict=True))


def loss_of(batch):
    return nn.functional.cross_entropy(head(batch[0]), batch[1])


def difference(gradient):
    return f"{(gradient - expected).norm() / expected.norm():.0%}"


expected = torch.autograd.grad(loss_of((inputs, labels)), head.weight)[0]
means = [torch.autograd.grad(loss_of(batch), head.weight)[0] for batch in micro_batches]
print("mean of the two gradients:", difference((means[0] + means[1]) / 2), "from the full batch")

engine = roomier.prepare(head, torch.optim.SGD(head.parameters(), lr=0.1))
engine.forward_backward(loss_of, micro_batches)
print("gradient in roomier:      ", difference(head.weight.grad), "from the full batch")
