"""Checks of the model."""
