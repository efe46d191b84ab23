python -i -c 'import sys; sys.ps1 = ""; exec(open("cells.py").read())' < /dev/null
