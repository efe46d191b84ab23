python train.py complete 50 2> run.log
