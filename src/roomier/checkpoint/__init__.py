"""Checkpoints: a nested state of tensors and plain values, saved as a folder that is committed atomically.

A checkpoint folder contains ``run.json`` (all values that are not tensors, and the list of files with their sizes and
checksums) and safetensors files. Loading a checkpoint never executes code from it.
"""

from roomier.checkpoint.background import BackgroundSaver
from roomier.checkpoint.commit import clear_stale, remove
from roomier.checkpoint.find import find_last, list_complete, verify
from roomier.checkpoint.module import load_datamodule, load_module
from roomier.checkpoint.tree import TensorSpec
from roomier.checkpoint.uploads import upload
from roomier.checkpoint.verbs import UNREAD, load, peek, save

__all__ = [
    "UNREAD",
    "BackgroundSaver",
    "TensorSpec",
    "clear_stale",
    "find_last",
    "list_complete",
    "load",
    "load_datamodule",
    "load_module",
    "peek",
    "remove",
    "save",
    "upload",
    "verify",
]
