"""Candidate plans, the choice of the fastest plan that fits, and alternatives if no plan fits."""
