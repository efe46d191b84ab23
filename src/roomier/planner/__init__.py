"""Forecasts before a run: bytes and seconds of each plan, and the choice of a plan."""
