python slow.py 2>&1 | grep -A 2 "profiler 'simple'"
