"""Checks of gradients."""
