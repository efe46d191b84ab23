"""Small trained parts on a frozen model, and frozen weights in few bits."""
