"""The doctor: from what was measured in a run to findings; the same for a living run, a dead one and a foreign loop.

``checks`` judge what ``measure`` measures, as frozen dataclasses of ``facts``; ``remedies`` are tried on a replay.
Checks need no torch.
"""
