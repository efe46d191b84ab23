python diverges.py every 2>&1 | tail -1
