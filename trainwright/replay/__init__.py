"""Runs recorded steps again, as they were or with one thing changed; afterwards everything is as it was before."""
