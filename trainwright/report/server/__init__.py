"""The pages of runs, live, on a server of this machine."""
