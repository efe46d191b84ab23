"""Existing engines that start, restart and resize the ranks of a job."""
