"""A plan priced by formula, from one trace of its model."""
