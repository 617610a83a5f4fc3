"""Checks of evaluations."""
