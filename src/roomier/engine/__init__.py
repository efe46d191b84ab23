"""Engines that run the steps of a module under a Plan, and ``build``, which creates them."""
