"""Dtypes of weights and computation, and the loss scale that prevents underflow of gradients."""
