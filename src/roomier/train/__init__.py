"""The training and evaluation loops, and the code that runs before and after them."""
