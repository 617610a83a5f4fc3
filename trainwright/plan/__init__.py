"""What will happen, by arithmetic: no torch at import, no device needed."""
