"""Looks at a step after it has happened; reads only."""
