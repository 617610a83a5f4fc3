"""Findings and records as words and pictures."""
