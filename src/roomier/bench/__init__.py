"""Named measurements: ``roomier bench NAME`` runs one and prints what it found."""
