"""Forecasts of memory and step time for each plan before a run, and the choice of a plan."""
