"""Searches for the learning rate and the micro-batch size, which run on a copy of the model before a fit."""
