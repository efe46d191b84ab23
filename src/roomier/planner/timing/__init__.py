"""Forecast of the seconds of a step."""
