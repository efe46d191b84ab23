roomier report runs/version_0 runs/version_1 --html runs.html
