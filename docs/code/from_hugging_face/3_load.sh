python load.py 2> /dev/null
