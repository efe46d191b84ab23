"""The state and the settings of one call of fit, validate, test or predict, as values."""
