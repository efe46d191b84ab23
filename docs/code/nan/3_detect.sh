python diverges.py detect 2>&1 | grep -A 1 -e 'in training_step$' -e '^RuntimeError'
