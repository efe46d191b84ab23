"""``roomier bench gpu``: measurements of an accelerator in several parts."""
