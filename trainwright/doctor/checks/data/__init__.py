"""Checks of the data: samples, their order, their labels, and their scale."""
