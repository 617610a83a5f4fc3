"""Checks of precision."""
