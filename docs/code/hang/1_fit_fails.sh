python hangs.py 2> run.log
