roomier --version
