"""State and settings of one call of fit, validate, test or predict."""
