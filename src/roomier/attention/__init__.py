"""Selection of the attention kernel, and reporting of the kernel that ran."""
