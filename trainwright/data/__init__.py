"""The data that ships in the box, the order in which samples are visited, a dataset's fingerprint."""
