import torch
from torch.utils.data import DataLoader

from roomier.data import LengthGroupedBatchSampler, PackedCollate

torch.manual_seed(0)
lengths = torch.randint(5, 200, (400,)).tolist()
texts = [{"input_ids": list(range(length))} for length in lengths]

sampler = LengthGroupedBatchSampler(lengths, max_tokens=1024)
batches = list(sampler)
padded = sum(len(batch) * max(lengths[index] for index in batch) for batch in batches)
print(f"groups: {len(batches)} batches, {1 - sum(lengths) / padded:.1%} of the tokens are padding")

loader = DataLoader(texts, batch_sampler=sampler, collate_fn=PackedCollate())
batch = next(iter(loader))
print({name: tuple(value.shape) for name, value in batch.items() if isinstance(value, torch.Tensor)})
