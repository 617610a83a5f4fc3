"""Sends messages about a run to people: rules that decide when, and channels that deliver."""
