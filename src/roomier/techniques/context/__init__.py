"""Context parallelism: the blocks of a model run on slices of the sequence, all other code on the whole sequence."""
