"""Runs of the Trainwright engine: from a recipe or live objects to a trained model in one run folder."""
