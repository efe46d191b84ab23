"""Number formats of a run: what is computed in which, and what keeps small gradients from vanishing."""
