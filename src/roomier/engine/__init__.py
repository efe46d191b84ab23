"""Engines that run the steps of a module under a Plan, and the ``build`` function, which creates an engine."""
