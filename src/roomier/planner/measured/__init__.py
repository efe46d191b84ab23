"""Forecasts compared with measurements: the record of a run, calibration, and out-of-memory errors."""
