"""Checks of the training loop."""
