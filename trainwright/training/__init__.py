"""A run of our own engine: from a recipe or live objects to a trained model in one run folder."""
