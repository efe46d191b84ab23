from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("exported")
print(f"{type(model).__name__} with {model.num_parameters():,} parameters")
