roomier report runs/planned
