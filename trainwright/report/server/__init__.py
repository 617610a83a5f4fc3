"""Live pages of runs, served on this machine."""
