"""Checks of number formats, and of steps that are not finite."""
