"""Checks of what the loss function compares, and of what it is made of."""
