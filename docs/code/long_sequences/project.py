import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import roomier


class Llama(roomier.Module):
    def __init__(self):
        super().__init__()
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=512, **sizes))

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Tokens(roomier.DataModule):
    def train_dataloader(self):
        return DataLoader(torch.arange(8 * 512).view(8, 512) % 251, batch_size=2)
