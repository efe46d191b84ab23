import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
model = AutoModelForCausalLM.from_pretrained("merged")
prompt = torch.tensor([list(b"    def forward(self, ")])
output = model.generate(
    prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=30, do_sample=False, pad_token_id=0
)
print(bytes(output[0].tolist()).decode(errors="replace"))
