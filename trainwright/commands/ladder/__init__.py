"""``ladder``: from a float32 baseline to a fast run, one change at a time."""
