"""Checks of what is loaded and resumed."""
