"""The doctor: from measurements of a run to findings, for live runs, finished runs and user loops alike.

``checks`` evaluate measurements of ``measure``, which are dataclasses of ``facts``. ``remedies`` are tried in a replay.
Checks need no torch.
"""
