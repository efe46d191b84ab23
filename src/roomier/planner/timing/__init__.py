"""Forecast of the step time."""
