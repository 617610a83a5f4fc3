"""Checks of runs of several processes."""
