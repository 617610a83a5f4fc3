"""The division of a step among the ranks of a run."""

from __future__ import annotations

from typing import NamedTuple

from trainwright.distributed.group import SOLO, World
from trainwright.engine.stage_passes import StagedPasses
from trainwright.engine.synced_norms import LOCAL_STATISTICS, SyncedNorms


class RankLayout(NamedTuple):
    """Division of a step among the ranks of a run; by default there is one rank.

    Attributes:
        sums: Ranks whose gradients and losses are summed.
        data: Ranks with different samples. None: the same as ``sums``. With context parallelism they are fewer, because
            several ranks hold parts of the same samples.
        exact: Gradients have the same bits on any number of ranks, see ``accumulate_exactly``.
        zero: ZeRO stage of a model that FSDP has sharded, see ``ShardedPasses``.
        divided: Ranks compute parts of the same layers or sequences, and communicate in each pass.
        copies: Ranks that have the same experts. None: experts are not divided.
        stages: Ranks compute consecutive layers (pipeline parallelism).
        stream: Number of this rank's random stream; by default its rank in ``sums``.
        norms: BatchNorms that exchange batch statistics.
    """

    sums: World = SOLO
    data: World | None = None
    exact: bool = False
    zero: int = 3
    divided: bool = False
    copies: World | None = None
    stages: StagedPasses | None = None
    stream: int | None = None
    norms: SyncedNorms = LOCAL_STATISTICS


ONE_RANK_LAYOUT = RankLayout()
"""Layout of a single process."""
