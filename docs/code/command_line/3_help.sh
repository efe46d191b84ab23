roomier fit --help=debugging
