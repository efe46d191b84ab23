"""Support for the names and callbacks of Lightning's Trainer."""
