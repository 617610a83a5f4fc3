"""Checks of the loss."""
