"""Checkpoints: a nested state of tensors and plain values, as a folder that appears whole or not at all.

A checkpoint folder holds ``run.json`` (all that is not a tensor, and the list of files with sizes and checksums)
and safetensors files. Nothing in it is code, and nothing in it is ever executed.
"""

from roomier.checkpoint.background import BackgroundSaver
from roomier.checkpoint.commit import clear_stale, remove
from roomier.checkpoint.find import find_last, list_complete, verify
from roomier.checkpoint.module import load_module
from roomier.checkpoint.tree import TensorSpec
from roomier.checkpoint.verbs import UNREAD, load, peek, save

__all__ = [
    "UNREAD",
    "BackgroundSaver",
    "TensorSpec",
    "clear_stale",
    "find_last",
    "list_complete",
    "load",
    "load_module",
    "peek",
    "remove",
    "save",
    "verify",
]
