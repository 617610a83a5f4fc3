"""Measurements behind the claims of the README, one JSON line per figure. Run ``python -m benchmarks.NAME``."""
