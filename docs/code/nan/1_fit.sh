python diverges.py 2>&1 | tail -1
