"""Checks of losses."""
