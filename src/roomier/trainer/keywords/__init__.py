"""Arguments of the Trainer: what they mean, and names of earlier versions."""
