"""Conversion of the Trainer's arguments, and recommendations for arguments of other Trainers."""
