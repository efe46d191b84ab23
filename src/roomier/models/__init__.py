"""GPT in plain ``torch.nn``, for plans without a model of your own and for examples."""
