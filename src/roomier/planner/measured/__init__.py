"""Comparison of forecasts with measurements: the record of a run, and out-of-memory errors."""
