"""Memory of a rank by kind, predicted by a formula before a run and measured during a run."""
