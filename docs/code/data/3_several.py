import torch
from torch.utils.data import DataLoader, TensorDataset

from roomier.data import CombinedLoader

labeled = DataLoader(TensorDataset(torch.arange(6)), batch_size=2)
unlabeled = DataLoader(TensorDataset(torch.arange(100, 110)), batch_size=2)

for mode in ("min_size", "max_size", "max_size_cycle", "sequential"):
    print(mode)
    for batch, batch_idx, _ in CombinedLoader({"labeled": labeled, "unlabeled": unlabeled}, mode):
        print(" ", batch_idx, batch)
