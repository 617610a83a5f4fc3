"""Reads the first samples of a training set for the plan, after a forked process has read them without a crash."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice

from torch.utils.data import TensorDataset

from trainwright.data.fetch import AnyDataset, Sample
from trainwright.data.fork import try_in_fork
from trainwright.data.unwrap import length_of
from trainwright.errors import TrainwrightError

LIMIT_S = 2.0
"""Time limit for the separate process. Samples it could not read in time are not read here."""


def first_samples(dataset: AnyDataset, most: int, left_out: Collection[int] = ()) -> Iterator[Sample]:
    """Yield at most ``most`` readable samples, none of them in ``left_out``; fewer if they are slow to read.

    Raises DataError if one terminates the process that tries it.
    """
    positions = list(islice((i for i in range(length_of(dataset) or 0) if i not in left_out), most))
    if not isinstance(dataset, TensorDataset):
        tried = try_in_fork(dataset, positions, limit_s=LIMIT_S)
        positions = positions[: max(1, tried)]
    for position in positions:
        try:
            sample = dataset[position]
        except TrainwrightError:
            raise
        except (Exception, SystemExit):
            # training raises this error with the sample's id, unless the sample is in the checkpoint's quarantine
            continue
        yield sample
