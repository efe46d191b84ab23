from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from transformers.utils import logging

logging.disable_progress_bar()
set_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
    bos_token_id=0,
    eos_token_id=0,
)
LlamaForCausalLM(config).save_pretrained("base")
