"""Conversion of the Trainer's arguments, and advice on arguments of other Trainers."""
