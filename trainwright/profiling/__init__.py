"""Profiles the time of a step: measures it inside a loop, compares it with the roofline, and tries remedies."""
