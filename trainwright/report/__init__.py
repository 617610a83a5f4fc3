"""Findings and facts in words and pictures: no torch at import."""
