"""Candidate plans, choice of the fastest plan that fits, and alternatives if no plan fits."""
