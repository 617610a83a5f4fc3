"""What each rank of a run tells of its steps, and the comparison of all."""
