"""Measurements of several ranks. Each rank reports its own steps; rank 0 compares them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from trainwright.doctor.context import RunContext
from trainwright.doctor.finding import listed
from trainwright.runs.records import Where

FOLDS = 64
"""Maximum number of checksums per kind that a rank sends. Larger models add up the checksums of neighbours."""


@dataclass(frozen=True, kw_only=True)
class ExchangeFacts:
    """Gradient exchange of one rank in one step.

    Attributes:
        wrapped_calls: Forward calls through DistributedDataParallel.
        synced_calls: Number of these outside of ``no_sync``.
        last_synced: The last forward call was one of ``synced_calls``.
    """

    wrapped_calls: int = 0
    synced_calls: int = 0
    last_synced: bool = False


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """One step of one rank. Step 0 is the state at the start.

    Checksums are over bits, in the order of the model; None for tensors that may differ between ranks.

    Attributes:
        rank: The rank.
        step: The step.
        weights: Checksums of the weights.
        gradients: Checksums of the gradients at the update.
        reduced: Checksums of the gradients after the last backward pass.
        moments: Checksums of the optimizer state.
        buffers: Checksums of the buffers.
        factor: Factor by which the gradients of a part changed between backward pass and update.
        divides: The forward pass communicates or is a pipeline stage.
        program: The operations of the rank, as text.
        groups: Hyperparameters of the optimizer groups.
        schedule: Line that steps a scheduler.
        micro_batches: Number of micro-batches.
        samples: Ids of the samples.
        batch: Checksum of the inputs.
        rng: Checksum of the generator states after the batch was read.
        draws: The step drew numbers from these generators.
        summed: The gradients are sums over ranks, of mean losses, and were not divided.
        shrunk: The gradients are means over ranks, of losses that were already divided by the number of ranks.
        without_gradient: Parameters without a gradient.
        exchange: Gradient exchange.
        steps: Number of steps that the times cover.
        own_s: Median time of a step outside of calls that wait for other ranks, in seconds.
        step_s: Median time of a step, in seconds.
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
    """A weight of one rank that changed between two updates. ``one_bit``: one bit of one number changed."""

    step: int
    parameter: str
    one_bit: bool


@dataclass(frozen=True, kw_only=True)
class NonfiniteFacts:
    """The first step of a rank that was not finite: its local loss before any exchange, and its inputs."""

    step: int
    own_loss: float
    inputs_finite: bool = True
    samples: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """Progress of one rank.

    Attributes:
        rank: The rank.
        host: Name of its machine.
        step: Number of completed updates.
        phase: Current phase of the step: begin, forward, backward or another one.
        still_s: Time in this phase, in seconds.
        stalled: The rank was found to be stalled.
        collectives: Number of collectives that were started.
        ended: "" while the watch is active, "finished", or the error that ended it.
        unused: Parameters that DistributedDataParallel found without a gradient.
        where: Line at which its thread was when it was found to be stalled.
        nonfinite: Its first step that was not finite.
        changes: Weights that changed between updates.
        silent_s: Time since its last message, in seconds.
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
        """The current step; between steps, the last completed one."""
        return self.step + (self.phase in ("forward", "backward"))


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """A quantity that must be the same on all ranks and was not.

    Attributes:
        what: The quantity.
        step: First step in which the ranks differ.
        agreed: Last step in which they agreed; -1 if they never did.
        ranks: Ranks that differ from the majority; () without a majority.
        names: The parameters or hyperparameters.
        source: Line that sets them.
        one_bit: One bit of one number differs.
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
    """A quantity that should differ between ranks and was the same in ``same`` of ``compared`` steps, on ``ranks``."""

    what: str
    same: int
    compared: int
    since: int
    ranks: tuple[int, ...]

    @property
    def is_no_chance(self) -> bool:
        """Returns True for half of the steps and at least two: one may be the last, short batch."""
        return self.same >= 2 and 2 * self.same >= self.compared


@dataclass(frozen=True, kw_only=True)
class ProgramDifference:
    """Operations that differ between ranks.

    Attributes:
        what: The part of the step.
        since: First step with a difference.
        rows: Number of compared steps with a difference.
        words: The operations of each rank, as text.
    """

    what: str
    since: int
    rows: int
    words: tuple[str, ...]

    @property
    def is_no_chance(self) -> bool:
        """Returns True if two compared steps differ. In a single one, control flow may depend on the data."""
        return self.rows >= 2


@dataclass(frozen=True, kw_only=True)
class PaceFacts:
    """Step times of the ranks.

    Attributes:
        own_s: For each rank, the median time of a step outside of communication, in seconds.
        step_s: Median time of a step, in seconds.
        behind: Ranks that were far slower in every compared row.
        since: First step in which they were.
    """

    own_s: tuple[float, ...]
    step_s: float
    behind: tuple[int, ...] = ()
    since: int = 0


@dataclass(frozen=True, kw_only=True)
class RanksFacts:
    """Comparison of all ranks by rank 0.

    Attributes:
        size: Number of ranks.
        present: Ranks that are watched.
        newest: Last compared step.
        compared: Number of compared steps.
        disagreements: Quantities that differ and must not.
        coincidences: Quantities that are equal and should not be.
        exchange: Gradient exchange in the first step in which gradients differed, on the rank that exchanged least.
        is_wrapped: DistributedDataParallel wraps the model.
        programs: Operations that differ.
        are_reduced: Gradients were also compared as the backward passes left them.
        factors: Factor by which each rank scaled its part of the gradients, if these differ.
        factors_since: First step in which they differ.
        summed_since: First step with gradients that were summed instead of averaged.
        shrunk_since: First step with gradients that were averaged twice.
        missing: Parameters without a gradient on rank ``missing_on`` alone.
        missing_on: That rank.
        statuses: Progress of each rank.
        pace: Step times.
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
        """Returns the disagreement about ``what``; None if the ranks agree."""
        return next((each for each in self.disagreements if each.what == what), None)

    def coincidence(self, what: str) -> Coincidence | None:
        return next((each for each in self.coincidences if each.what == what), None)

    @property
    def are_changed_apart(self) -> bool:
        """Returns True if the gradients of all ranks were equal after the exchange, but not at the update."""
        at_update, before = self.disagreement("gradients"), self.disagreement("reduced gradients")
        return at_update is not None and self.are_reduced and (before is None or before.step > at_update.step)

    @property
    def writers(self) -> dict[int, int]:
        """The ranks whose code wrote to several parameters between two updates while others did not, with the step."""
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
        """Ranks that finished before a step in which another rank is stalled or failed."""
        stuck = [each for each in self.statuses if each.stalled or each.ended not in ("", "finished")]
        begun = max((each.begun for each in stuck), default=0)
        return [each for each in self.statuses if each.ended == "finished" and each.step < begun]

    @property
    def guilty_of_nonfinite(self) -> tuple[RankStatus, ...]:
        """Ranks whose local loss was the first that was not finite, if the loss of another rank was finite then."""
        bad = [(each, each.nonfinite) for each in self.statuses if each.nonfinite is not None]
        first = min((found.step for _, found in bad), default=0)
        own = [each for each, found in bad if found.step == first and not math.isfinite(found.own_loss)]
        are_there = any(each not in own and (each.begun >= first or each.nonfinite) for each in self.statuses)
        return tuple(own) if are_there else ()


LOCAL_STEPS = 16
"""Steps within which ranks that train apart are expected to combine their weights."""


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
