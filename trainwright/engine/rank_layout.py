"""How the ranks of a run divide a step."""

from __future__ import annotations

from typing import NamedTuple

from trainwright.distributed.group import SOLO, World
from trainwright.engine.compressed import GradientSum, sum_whole
from trainwright.engine.in_stages import StagedPasses
from trainwright.engine.synced_norms import OWN_STATISTICS, SyncedNorms


class RankLayout(NamedTuple):
    """How the ranks of a run divide its steps; by default there is one rank.

    ``sums`` are those whose gradients and losses add up. ``data`` are those whose samples differ, where some of
    ``sums`` share theirs and each has a part of them (context parallelism); None: the same. ``exact``: gradients have
    the same bits on any number of ranks, see ``accumulate_exactly``. ``zero`` is about a model that FSDP has sharded,
    see ``ShardedPasses``. ``divided``: ranks compute parts of the same layers or sequences, and exchange something in
    each pass. ``stages``: they compute layers that follow each other (pipeline parallelism). ``stream`` is the number
    of this rank's random numbers, by default its rank in ``sums``. ``norms`` exchange statistics of a batch.
    ``sum_gradients`` sums what copies of the model have.
    """

    sums: World = SOLO
    data: World | None = None
    exact: bool = False
    zero: int = 3
    divided: bool = False
    stages: StagedPasses | None = None
    stream: int | None = None
    norms: SyncedNorms = OWN_STATISTICS
    sum_gradients: GradientSum = sum_whole


ALONE = RankLayout()
"""One process."""
