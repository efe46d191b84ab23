python module.py 2> run.log
