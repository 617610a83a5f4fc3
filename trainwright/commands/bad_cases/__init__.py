"""``tw.bad_cases`` and ``trainwright errors``: finds the worst predictions of a model, and likely wrong labels."""
