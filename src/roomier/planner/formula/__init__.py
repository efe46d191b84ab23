"""Forecasts by formula, from one trace of the model."""
