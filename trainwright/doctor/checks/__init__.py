"""The checks, in a folder for each topic."""
