python compare.py 2> run.log
