"""Measurements of several ranks. Each rank reports its own steps; rank 0 compares them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from trainwright.doctor.context import RunContext
from trainwright.errors import listed
from trainwright.runs.records import Where

FOLDS = 64  # Maximum number of checksums per kind that a rank sends. Larger models add up the checksums of neighbours.

REPLAYED = "replayed gradients"


@dataclass(kw_only=True)
class ExchangeFacts:
    """Gradient exchange of one rank in one step."""

    wrapped_calls: int = 0  # Forward calls through DistributedDataParallel
    synced_calls: int = 0  # Number of these outside of ``no_sync``
    last_synced: bool = False  # The last forward call was one of ``synced_calls``


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """One step of one rank. Step 0 is the state at the start.

    Checksums are over bits, in the order of the model; None for tensors that may differ between ranks.
    """

    rank: int
    step: int
    weights: tuple[int, ...] = ()  # Checksums of the weights
    gradients: tuple[int, ...] = ()  # Checksums of the gradients at the update
    reduced: tuple[int, ...] = ()  # Checksums of the gradients after the last backward pass
    replayed: tuple[tuple[int, ...], ...] = ()  # Checksums of gradients before the sum over ranks: first
    # of the batch of this rank, then of its replays of the batches of the previous ranks, backwards around the ring.
    processor: str = ""  # Name of the processor of this rank
    moments: tuple[int | None, ...] = ()  # Checksums of the optimizer state
    buffers: tuple[int | None, ...] = ()  # Checksums of the buffers
    factor: float | None = None  # For sharded models: gradient norm at the update / after the backward pass
    divides: bool = False  # The forward pass communicates or is a pipeline stage
    program: dict[str, str] = field(default_factory=dict)  # The operations of the rank, as text
    groups: tuple[dict[str, float], ...] = ()  # Hyperparameters of the optimizer groups
    schedule: str = ""  # Line that steps a scheduler
    micro_batches: int = 0  # Number of micro-batches
    samples: tuple[int, ...] = ()  # Ids of the samples
    batch: int | None = None  # Checksum of the inputs
    rng: int | None = None  # Checksum of the generator states after the batch was read
    draws: bool = False  # The step drew numbers from these generators
    summed: bool = False  # The gradients are sums over ranks, of mean losses, and were not divided
    shrunk: bool = False  # The gradients are averaged over ranks, and the loss was also divided by the number of ranks
    without_gradient: tuple[str, ...] = ()  # Parameters without a gradient
    exchange: ExchangeFacts = field(default_factory=ExchangeFacts)  # Gradient exchange
    steps: int = 0  # Number of steps that the times cover
    own_s: float = 0.0  # Median time of a step outside of calls that wait for other ranks, in seconds
    step_s: float = 0.0  # Median time of a step, in seconds


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
class CollectiveFacts:
    """A collective of one rank: the last completed one of its group, or the first or the last one after it."""

    group: str
    number: int  # Its number in the group, the same on all ranks; 0 for a message between two ranks
    what: str  # Its name with dtypes and shapes, such as "all_reduce of Float [3]"
    is_done: bool


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """Progress of one rank."""

    rank: int
    host: str = ""  # Name of its machine
    step: int = 0  # Number of completed updates
    phase: str = "begin"  # Current phase of the step: begin, forward, backward or another one
    still_s: float = 0.0  # Time in this phase, in seconds
    stalled: bool = False  # The rank was found to be stalled
    collectives: int = 0  # Number of collectives that were started
    ended: str = ""  # "" while the watch is active, "finished", or the error that ended it
    unused: tuple[str, ...] = ()  # Parameters that DistributedDataParallel found without a gradient
    where: str = ""  # Line at which its thread was when it was found to be stalled
    recorded: tuple[CollectiveFacts, ...] = ()  # Its collectives by then, in order, if torch's flight recorder is on
    nccl: tuple[str, ...] = ()  # Missing ranks and different counts that NCCL reports for the stall, on rank 0
    nonfinite: NonfiniteFacts | None = None  # Its first step that was not finite
    changes: tuple[WeightsChange, ...] = ()  # Weights that changed between updates
    silent_s: float = 0.0  # Time since its last message, in seconds

    @property
    def begun(self) -> int:
        """The current step; between steps, the last completed one."""
        return self.step + (self.phase in ("forward", "backward"))


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """A quantity that must be the same on all ranks and was not."""

    what: str  # The quantity
    step: int  # First step in which the ranks differ
    agreed: int  # Last step in which they agreed; -1 if they never did
    ranks: tuple[int, ...] = ()  # Ranks that differ from the majority; () without a majority
    names: tuple[str, ...] = ()  # The parameters or hyperparameters
    source: str = ""  # Line that sets the hyperparameters
    one_bit: bool = False  # One bit of one number differs


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
        """True if it was the same in half of the steps and at least two: an epoch may end in a short batch."""
        return self.same >= 2 and 2 * self.same >= self.compared


@dataclass(frozen=True, kw_only=True)
class ProgramDifference:
    """Operations that differ between ranks."""

    what: str  # The part of the step
    since: int  # First step with a difference
    rows: int  # Number of compared steps with a difference
    words: tuple[str, ...]  # The operations of each rank, as text

    @property
    def is_no_chance(self) -> bool:
        """Returns True if two compared steps differ. In a single one, control flow may depend on the data."""
        return self.rows >= 2


@dataclass(frozen=True, kw_only=True)
class PaceFacts:
    """Step times of the ranks."""

    own_s: tuple[float, ...]  # For each rank, the median time of a step outside of communication, in seconds
    step_s: float  # Median time of a step, in seconds
    behind: tuple[int, ...] = ()  # Ranks slow in each of the last rows; if any, also those slow by their median
    since: int = 0  # Step of the first of these rows


@dataclass(frozen=True, kw_only=True)
class RanksFacts:
    """Comparison of all ranks by rank 0."""

    experiment: ClassVar[str] = "ranks"
    size: int  # Number of ranks
    present: tuple[int, ...] = ()  # Ranks that are watched
    newest: int = 0  # Last compared step
    compared: int = 0  # Number of compared steps
    disagreements: tuple[Disagreement, ...] = ()  # Quantities that differ and must not
    coincidences: tuple[Coincidence, ...] = ()  # Quantities that are equal and should not be
    exchange: ExchangeFacts | None = None  # When gradients first differed, those of the rank that exchanged least
    is_wrapped: bool = False  # DistributedDataParallel wraps the model
    programs: tuple[ProgramDifference, ...] = ()  # Operations that differ
    are_reduced: bool = False  # Gradients were also compared right after the last backward pass
    factors: tuple[float, ...] = ()  # ``RankStep.factor`` of each rank, if the factors differ
    factors_since: int | None = None  # First step in which the factors differ
    summed_since: int | None = None  # First step with gradients that were summed instead of averaged
    shrunk_since: int | None = None  # First step with gradients that were averaged twice
    missing: tuple[str, ...] = ()  # Parameters without a gradient on ``missing_on`` that have one on another rank
    missing_on: int | None = None  # The rank that lacks these gradients
    statuses: tuple[RankStatus, ...] = ()  # Progress of each rank
    pace: PaceFacts | None = None  # Step times

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
        """The ranks whose code wrote to several parameters between two updates, with the first such step.

        {} if parameters of every rank were written to between updates.
        """
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
    def first_nonfinite(self) -> tuple[RankStatus, ...]:
        """Ranks whose local loss was the first that was not finite, if the loss of another rank was finite then."""
        bad = [(each, each.nonfinite) for each in self.statuses if each.nonfinite is not None]
        first = min((found.step for _, found in bad), default=0)
        own = [each for each, found in bad if found.step == first and not math.isfinite(found.own_loss)]
        are_there = any(each not in own and (each.begun >= first or each.nonfinite) for each in self.statuses)
        return tuple(own) if are_there else ()


LOCAL_STEPS = 16  # Steps within which ranks that train apart are expected to combine their weights


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
    """Returns why different gradients are no fault (local SGD) or not yet known to be one; None if they are one."""
    gradients = facts.disagreement("gradients")
    if gradients is None or gradients.agreed > 0 or facts.is_wrapped or facts.are_changed_apart:
        return None
    if facts.statuses and all(each.changes for each in facts.statuses):
        return "the ranks train apart and set their weights equal between updates"
    if facts.newest < LOCAL_STEPS and not run.finished:
        return f"ranks that train apart may combine their weights within {LOCAL_STEPS} steps"
    return None
