"""Selection of the attention kernel, and report of the kernels that ran."""
