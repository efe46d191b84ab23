"""A rank of the training that torchrun or SLURM starts: ``NOTES OPTIONS [KILLED_ATTEMPTS]``, as JSON. Without attempts
that end with a kill, the training is slow while the file ``NOTES/slow`` exists."""

import json
import os
import sys
from pathlib import Path

from roomier.callbacks import ModelCheckpoint
from tests.engines.training import Kill, Slow, train

notes = Path(sys.argv[1])
train(
    notes,
    before_step=Kill(notes, json.loads(sys.argv[3]), within=8) if sys.argv[3:] else Slow(notes),
    num_ranks=int(os.environ.get("WORLD_SIZE") or os.environ["SLURM_NTASKS"]),
    callbacks=[ModelCheckpoint(every_n_train_steps=4)],
    default_root_dir=notes / "runs",
    **json.loads(sys.argv[2]),
)
