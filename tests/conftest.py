"""Before torch is imported: one thread, so that tests and the processes they start compute the same
numbers on every machine and do not compete for its cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
