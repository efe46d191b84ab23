import torch

complete, stopped = torch.load("complete.pt"), torch.load("stopped.pt")
print("bit-identical:", all(torch.equal(complete[name], stopped[name]) for name in complete))
