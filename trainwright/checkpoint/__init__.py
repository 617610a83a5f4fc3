"""What a run *is* at step n, and how it is kept."""
