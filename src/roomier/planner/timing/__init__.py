"""Forecast of the duration of a step."""
