"""Checks of evaluation."""
