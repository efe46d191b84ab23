import torch

loop, module = torch.load("loop.pt"), torch.load("module.pt")
print("bit-identical:", all(torch.equal(loop[name], module[name]) for name in loop))
