pip install git+https://github.com/roomier/roomier.git
