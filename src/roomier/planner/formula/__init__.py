"""Forecasts that are calculated from one trace of the model."""
