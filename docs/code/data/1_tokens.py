from torch.utils.data import DataLoader

import roomier
from roomier.data import TokenDataset, write_tokens
from roomier.models.gpt import GPT, GPTConfig

roomier.seed_everything(0)
documents = [[1, 2, 3, 4] * 50, [5, 6, 7] * 60]
write_tokens("tokens.bin", documents, vocab_size=9, end_of_document=8)

tokens = TokenDataset("tokens.bin", 32)
print(len(tokens), "sequences with", tokens[0]["input_ids"].shape[0], "tokens")
model = GPT(GPTConfig(vocab_size=tokens.vocab_size, context=32, num_layers=2, num_heads=2, width=32))
trainer = roomier.Trainer(
    optimizer="adamw",
    learning_rate=1e-2,
    max_epochs=20,
    enable_plan_table=False,
    enable_model_summary=False,
    enable_progress_bar=False,
)
trainer.fit(model, DataLoader(tokens, batch_size=4, shuffle=True))
