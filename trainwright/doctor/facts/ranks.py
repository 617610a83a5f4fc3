"""What is measured of several ranks. Each rank reports its own steps; the first one compares them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

FOLDS = 64
"""A rank sends at most so many checksums of a kind: those of a larger model are added up in runs of neighbours."""


@dataclass(frozen=True, kw_only=True)
class ExchangeFacts:
    """How one rank exchanged the gradients of a step.

    ``calls`` are forward calls of the model with gradients, ``wrapped_calls`` those through DistributedDataParallel,
    ``synced_calls`` those of them outside of ``no_sync``; ``last_synced``: the last call was one of these.
    """

    calls: int = 0
    wrapped_calls: int = 0
    synced_calls: int = 0
    last_synced: bool = False


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """One step as one rank saw it; step 0 is the state at the start.

    ``weights``, ``gradients`` (at the update), ``reduced`` (as the last backward pass left them), ``moments`` and
    ``buffers`` are checksums of bits, in the order of the model; None for what may differ. ``batch`` is that of the
    inputs, ``rng`` that of the state of the generators once the batch was read; ``draws``: the step drew numbers from
    them. ``factor`` is what the gradients of a part were multiplied by between backward pass and update. ``divides``:
    the forward pass communicates, or is a stage of a pipeline. ``program`` is what the rank does, in words.
    ``schedule`` is the line that steps a scheduler. ``summed``: the gradients are sums over the ranks, of losses that
    are means, and were not divided; ``shrunk``: they are means over the ranks, of losses that were divided by the
    number of ranks. Of the last ``steps`` steps ``own_s`` is the median time outside of calls in which ranks wait for
    each other, ``step_s`` that of the whole.
    """

    rank: int
    step: int
    weights: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    reduced: tuple[int, ...] = ()
    moments: tuple[int | None, ...] = ()
    buffers: tuple[int | None, ...] = ()
    factor: float | None = None
    divides: bool = False
    program: dict[str, str] = field(default_factory=dict)
    groups: tuple[dict[str, float], ...] = ()
    schedule: str = ""
    micro_batches: int = 0
    samples: tuple[int, ...] = ()
    batch: int | None = None
    rng: int | None = None
    draws: bool = False
    summed: bool = False
    shrunk: bool = False
    without_gradient: tuple[str, ...] = ()
    exchange: ExchangeFacts = ExchangeFacts()
    steps: int = 0
    own_s: float = 0.0
    step_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class WeightsChange:
    """Weights of one rank changed after an update and before the next one. ``one_bit``: by one bit of one number."""

    step: int
    parameter: str
    one_bit: bool


@dataclass(frozen=True, kw_only=True)
class NonfiniteFacts:
    """The first step of a rank that was not finite: its own loss before any exchange, and what its model was given."""

    step: int
    own_loss: float
    inputs_finite: bool = True
    samples: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """Where a rank is. ``step`` updates are done; ``phase`` is what it does since, for ``still_s`` seconds.

    ``collectives`` were begun in all. ``ended`` is "" while the watch goes on, "finished", or what ended it. ``host``
    is the name of its machine. ``unused`` are the parameters that DistributedDataParallel found without a gradient.
    ``where`` is the line that its thread has been at when it was found to be stalled. ``silent_s``: as long as nothing
    was heard of it.
    """

    rank: int
    host: str = ""
    step: int = 0
    phase: str = "begin"
    still_s: float = 0.0
    stalled: bool = False
    collectives: int = 0
    ended: str = ""
    unused: tuple[str, ...] = ()
    where: str = ""
    nonfinite: NonfiniteFacts | None = None
    changes: tuple[WeightsChange, ...] = ()
    silent_s: float = 0.0

    @property
    def begun(self) -> int:
        """The step that it is in, or has done last."""
        return self.step + (self.phase in ("forward", "backward"))


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """What must be the same on all ranks and was not, for the first time in ``step``; in step ``agreed`` it still was.

    ``agreed`` is -1 where it never was. ``ranks`` are those that differ from most; () where there are no most.
    ``names`` are the parameters or hyperparameters, ``source`` the line that sets these.
    """

    what: str
    step: int
    agreed: int
    ranks: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    source: str = ""
    one_bit: bool = False


@dataclass(frozen=True, kw_only=True)
class Coincidence:
    """What should differ between ranks and was the same in ``same`` of ``compared`` steps, on ``ranks``."""

    what: str
    same: int
    compared: int
    since: int
    ranks: tuple[int, ...]

    @property
    def is_no_chance(self) -> bool:
        """In half of all steps, and in two: one may be the last, short batch."""
        return self.same >= 2 and 2 * self.same >= self.compared


@dataclass(frozen=True, kw_only=True)
class ProgramDifference:
    """What the ranks do differently, in ``rows`` compared steps since ``since``: the words of each rank."""

    what: str
    since: int
    rows: int
    words: tuple[str, ...]

    @property
    def is_no_chance(self) -> bool:
        """In two compared steps: which program runs may depend on the data."""
        return self.rows >= 2


@dataclass(frozen=True, kw_only=True)
class PaceFacts:
    """Medians of the last rows of each rank. ``behind`` are the ranks that were far slower in each, since ``since``."""

    own_s: tuple[float, ...]
    step_s: float
    behind: tuple[int, ...] = ()
    since: int = 0


@dataclass(frozen=True, kw_only=True)
class RanksFacts:
    """What the first rank found when it compared the ranks.

    ``present`` are the ranks that are watched, of ``size``. ``compared`` steps were compared, the last is ``newest``.
    ``exchange`` is that of the first step in which gradients differed, on the rank that exchanged least.
    ``is_wrapped``: DistributedDataParallel wraps the model. ``are_reduced``: gradients were compared as the backward
    passes left them, too. ``factors`` are what each rank multiplied its part of the gradients by in step
    ``factors_since``, where these differ. ``missing`` are parameters without a gradient on rank ``missing_on`` alone.
    """

    experiment: ClassVar[str] = "ranks"
    size: int
    present: tuple[int, ...] = ()
    newest: int = 0
    compared: int = 0
    disagreements: tuple[Disagreement, ...] = ()
    coincidences: tuple[Coincidence, ...] = ()
    exchange: ExchangeFacts | None = None
    is_wrapped: bool = False
    programs: tuple[ProgramDifference, ...] = ()
    are_reduced: bool = False
    factors: tuple[float, ...] = ()
    factors_since: int | None = None
    summed_since: int | None = None
    shrunk_since: int | None = None
    missing: tuple[str, ...] = ()
    missing_on: int | None = None
    statuses: tuple[RankStatus, ...] = ()
    pace: PaceFacts | None = None

    def disagreement(self, what: str) -> Disagreement | None:
        """The one about ``what``; None where the ranks agree."""
        return next((each for each in self.disagreements if each.what == what), None)

    def coincidence(self, what: str) -> Coincidence | None:
        return next((each for each in self.coincidences if each.what == what), None)

    @property
    def are_changed_apart(self) -> bool:
        """The gradients of all ranks were the same after the exchange, and no longer at the update."""
        at_update, before = self.disagreement("gradients"), self.disagreement("reduced gradients")
        return at_update is not None and self.are_reduced and (before is None or before.step > at_update.step)

    @property
    def writers(self) -> dict[int, int]:
        """Ranks whose code wrote to several parameters between two updates, where others did not: in which step."""
        changed: dict[tuple[int, int], set[str]] = {}
        for status in self.statuses:
            for change in status.changes:
                changed.setdefault((status.rank, change.step), set()).add(change.parameter)
        ranks = {rank for rank, _ in changed}
        if len(ranks) == len(self.statuses):
            return {}
        return {rank: step for (rank, step), names in reversed(changed.items()) if len(names) > 1}

    @property
    def ended_early(self) -> list[RankStatus]:
        """Ranks that ended well, and before a step in which another stands or has failed."""
        stuck = [each for each in self.statuses if each.stalled or each.ended not in ("", "finished")]
        begun = max((each.begun for each in stuck), default=0)
        return [each for each in self.statuses if each.ended == "finished" and each.step < begun]

    @property
    def guilty_of_nonfinite(self) -> tuple[RankStatus, ...]:
        """Ranks whose own loss was the first that was not finite, where that of another was finite then."""
        bad = [(each, each.nonfinite) for each in self.statuses if each.nonfinite is not None]
        first = min((found.step for _, found in bad), default=0)
        own = [each for each, found in bad if found.step == first and not math.isfinite(found.own_loss)]
        are_there = any(each not in own and (each.begun >= first or each.nonfinite) for each in self.statuses)
        return tuple(own) if are_there else ()
