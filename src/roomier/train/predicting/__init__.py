"""Predictions that are returned one by one."""
