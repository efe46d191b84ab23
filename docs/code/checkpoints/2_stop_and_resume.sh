python train.py stopped 27 2> run.log
python train.py stopped 50 resume 2> run.log
