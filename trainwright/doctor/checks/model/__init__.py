"""Checks of the model: its wiring, its initialisation, its layers."""
