"""Engines that run the steps of a module under a Plan, and the function ``build``, which creates an engine."""
