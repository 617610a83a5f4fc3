"""Reports of each rank on its steps, and the comparison of all ranks."""
