"""The run folder and its log: the source of truth of a run, readable without torch."""
