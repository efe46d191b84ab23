python diverges.py guard 2>&1 | tail -2
