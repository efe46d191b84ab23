sed -n '/heartbeat: rank 1:/,/sleep/p' run.log | grep -A 1 "hangs.py"
