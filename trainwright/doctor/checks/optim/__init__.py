"""Checks of optimizers and updates."""
