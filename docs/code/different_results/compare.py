from train import train

first = train()
for changes in ({}, {"batch_size": 20, "accumulate_grad_batches": 2}, {"seed": 1}):
    difference = (train(**changes) - first).abs().max().item()
    size = "no difference" if difference == 0 else "below 1e-5" if difference < 1e-5 else "above 1e-2"
    print(f"{size:15} {changes or 'repeated'}")
