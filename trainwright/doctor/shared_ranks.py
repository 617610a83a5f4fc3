"""Texts about ranks, for the checks of ranks."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.ranks import Disagreement, RanksFacts
from trainwright.doctor.finding import listed
from trainwright.runs.records import Where

LOCAL_STEPS = 16
"""Steps within which ranks that train apart are expected to combine their weights."""


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


def trains_locally(run: RunContext, facts: RanksFacts) -> str | None:
    """Returns why different gradients are not a fault, or not yet known to be one: local SGD. None if they are."""
    gradients = facts.disagreement("gradients")
    if gradients is None or gradients.agreed > 0 or facts.is_wrapped or facts.are_changed_apart:
        return None
    if facts.statuses and all(each.changes for each in facts.statuses):
        return "the ranks train apart and set their weights equal between updates"
    if facts.newest < LOCAL_STEPS and not run.finished:
        return f"ranks that train apart may combine their weights within {LOCAL_STEPS} steps"
    return None
