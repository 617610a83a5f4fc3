"""Texts about ranks, for the checks of ranks."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.ranks import Disagreement, RanksFacts
from trainwright.doctor.finding import listed
from trainwright.runs.records import Where


def ranks_of(run: RunContext) -> RanksFacts:
    """Returns the newest comparison of the ranks, which the check requires."""
    facts = run.latest(RanksFacts)
    assert facts is not None
    return facts


def in_ranks(numbers: Sequence[int]) -> str:
    """Returns text such as ``rank 1`` or ``ranks 1, 2 and 5 more``."""
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {listed([str(each) for each in numbers], 6)}"


def since(differing: Disagreement) -> str:
    """Returns text about the first step in which the ranks differ."""
    if differing.agreed < 0:
        return "from the start" if differing.step == 0 else f"in step {differing.step}, the first that was compared"
    return f"in step {differing.step}; after step {differing.agreed} they were still the same"


def one_rank(ranks: Sequence[int]) -> Where:
    """Returns the place of a single rank; an empty place for several."""
    return Where(rank=ranks[0] if len(ranks) == 1 else None)
