"""Built-in datasets, the order in which samples are visited, and the fingerprint of a dataset."""
