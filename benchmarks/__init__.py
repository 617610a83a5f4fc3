"""What the README claims, measured: one JSON line for each figure. Run from the root: ``python -m benchmarks.NAME``."""
