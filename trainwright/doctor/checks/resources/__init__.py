"""Checks of memory, time, files and hooks."""
