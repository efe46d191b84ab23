"""Names and callbacks of Lightning's Trainer."""
