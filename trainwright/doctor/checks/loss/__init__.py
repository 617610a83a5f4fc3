"""Checks of the loss function and its targets."""
