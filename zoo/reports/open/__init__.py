"""Cases for work on checks."""
