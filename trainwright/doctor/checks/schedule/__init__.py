"""Checks of learning rates over the steps."""
