"""Selection of the attention kernel, and a report of the kernel that ran."""
