python auto.py 2> run.log
