"""Comparisons with a healthy run that the user names: ``tw.watch(..., like="runs/healthy")``."""
