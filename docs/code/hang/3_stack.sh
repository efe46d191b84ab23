grep -A 40 "heartbeat: rank 1:" run.log | grep -A 1 "hangs.py"
