from pathlib import Path

import torch
from project import Model

(checkpoint,) = Path("runs").glob("*/checkpoints/*")
model = Model.load_from_checkpoint(checkpoint)
prompt = torch.tensor([list(b"def forward(self, ")])
torch.manual_seed(0)
print(bytes(model.gpt.generate(prompt, 60, temperature=0.5)[0].tolist()).decode(errors="replace"))
