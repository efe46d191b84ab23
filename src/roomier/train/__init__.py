"""The loops of training and evaluation, and what comes before and after them."""
