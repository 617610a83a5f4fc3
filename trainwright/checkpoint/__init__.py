"""The state of a run at step n, and how it is saved."""
