"""Compares what the ranks tell of the same step. Without torch, and without knowing how they tell it."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence

from trainwright.doctor.facts.ranks import (
    Coincidence,
    Disagreement,
    ExchangeFacts,
    PaceFacts,
    ProgramDifference,
    RanksFacts,
    RankStatus,
    RankStep,
)

SAME: tuple[tuple[str, Callable[[RankStep], tuple[object, ...]]], ...] = (
    ("weights", lambda row: row.weights),
    ("gradients", lambda row: row.gradients),
    ("reduced gradients", lambda row: row.reduced),
    ("moments", lambda row: row.moments),
    ("buffers", lambda row: row.buffers),
    ("hyperparameters", lambda row: tuple(tuple(sorted(group.items())) for group in row.groups)),
    ("micro_batches", lambda row: (row.micro_batches,) if row.step else ()),
)
"""What is the same on every replica, and where it is in a row. An empty value was not measured."""
OF_PARAMETERS = ("weights", "gradients", "reduced gradients", "moments")
OTHER: tuple[tuple[str, Callable[[RankStep], Hashable]], ...] = (
    ("samples", lambda row: frozenset(row.samples) or None if row.batch is None else row.batch),
    ("random numbers", lambda row: row.rng if row.draws else None),
)
"""What differs between replicas. None was not measured."""
SAME_FACTOR = 5e-3
"""Quotients of norms that differ by less are the same factor: norms in fp32, gradients that are rounded to bf16."""
ROWS, STEPS_OF_ROW = 3, 4
"""So many rows, each the median of at least so many steps of its own, must show the same slow rank."""
MUCH_SLOWER, SHARE, LEAST_S = 1.5, 0.2, 0.005
"""A straggler takes so many times what the median rank takes by itself, so much of a step more, and so many seconds:
as long as a busy system lets others run."""


class Comparison:
    """The comparison of the ranks so far. ``names`` are those of the folded checksums, see ``facts.FOLDS``."""

    def __init__(self, size: int, names: Sequence[str]) -> None:
        self._size, self._names = size, list(names)
        self._agreed: dict[str, int] = {}
        self._differing: dict[str, Disagreement] = {}
        self._alike: dict[str, Coincidence] = {}
        self._exchange: ExchangeFacts | None = None
        self._programs: dict[str, ProgramDifference] = {}
        self._are_reduced = False
        self._factors: tuple[tuple[float, ...], int | None] = ((), None)
        self._summed_since: int | None = None
        self._shrunk: list[int] = []
        self._missing: tuple[tuple[str, ...], int | None] = ((), None)
        self._rows: deque[Sequence[RankStep]] = deque(maxlen=ROWS)
        self._is_wrapped = False
        self._compared, self._step = 0, 0
        self._begin: Sequence[RankStep] | None = None  # whose weights differ: replicas, or shards
        self._shards: frozenset[int] = frozenset()  # parameters of which each rank has its own part

    def add(self, rows: Sequence[RankStep]) -> None:
        """Takes the rows of one step, one of each rank that is present, in the order of the ranks."""
        if self._are_held(rows):
            return
        self._compared += rows[0].step > 0
        self._step = rows[0].step
        self._is_wrapped |= any(row.exchange.wrapped_calls for row in rows)
        for what, read in SAME:
            self._compare(what, {row.rank: read(row) for row in rows})
        if len(rows) == self._size and not self._shards:  # some ranks alone say little of how all share the data
            shares_samples = all(row.samples and row.samples == rows[0].samples for row in rows)
            for name, value_of in OTHER[: 1 if shares_samples else 2]:  # ranks that divide samples may draw alike
                self._note_alike(name, {row.rank: value_of(row) for row in rows})
        if self._exchange is None and "gradients" in self._differing:
            self._exchange = min((row.exchange for row in rows), key=lambda each: (each.last_synced, each.synced_calls))
        self._are_reduced |= all(row.reduced for row in rows)
        self._note_programs(rows)
        self._note_factors(rows)
        if self._summed_since is None and not self._shards and all(row.summed for row in rows):
            self._summed_since = self._step
        if all(row.shrunk for row in rows):
            self._shrunk.append(self._step)
        self._note_missing(rows)
        if min(row.steps for row in rows) >= STEPS_OF_ROW:
            self._rows.append(rows)

    def _are_held(self, rows: Sequence[RankStep]) -> bool:
        """Whether these rows wait for the next: what is a replica is inferred from the first gradients.

        A parameter is a shard where ranks begin with other values and update with other gradients, in a model of which
        other parameters are the same in both (tensor and expert parallelism). What began alike beside shards and has
        other gradients, such as a bias of zeros, is one, too.
        """
        begin, self._begin = self._begin, None
        if rows[0].step == 0:
            apart = _differing([row.weights for row in rows])
            self._begin = rows if apart else None
            return bool(apart)
        if begin is not None:
            apart, unlike = _differing([row.weights for row in begin]), _differing([row.gradients for row in rows])
            alike = len(rows[0].gradients) - len(apart | unlike)
            if apart & unlike and alike > 0 and len(begin) == len(rows):
                self._shards = frozenset(apart | unlike)
            self._step = 0
            self._compare("weights", {row.rank: row.weights for row in begin})
        return False

    def facts(self, present: Sequence[int], statuses: Sequence[RankStatus], lost: str = "") -> RanksFacts:
        """What is known now."""
        names, rank = self._missing
        return RanksFacts(
            size=self._size,
            present=tuple(present),
            newest=self._step,
            compared=self._compared,
            disagreements=tuple(self._differing.values()),
            coincidences=tuple(self._alike.values()),
            exchange=self._exchange,
            is_wrapped=self._is_wrapped,
            programs=tuple(self._programs.values()),
            are_reduced=self._are_reduced,
            factors=self._factors[0],
            factors_since=self._factors[1],
            summed_since=self._summed_since,
            shrunk_since=self._shrunk[0] if self._is_usual(len(self._shrunk)) else None,
            missing=names,
            missing_on=rank,
            statuses=tuple(statuses),
            pace=self._pace(),
            lost=lost,
        )

    def _is_usual(self, count: int) -> bool:
        """In two of the compared steps, and in half of them."""
        return count >= 2 and 2 * count >= self._compared

    def _note_programs(self, rows: Sequence[RankStep]) -> None:
        for what in rows[0].program:
            words = tuple(row.program.get(what, "") for row in rows)
            if all(words) and len(set(words)) > 1:
                before = self._programs.get(what)
                since, count = (before.since, before.rows) if before else (self._step, 0)
                self._programs[what] = ProgramDifference(what=what, since=since, rows=count + 1, words=words)

    def _note_factors(self, rows: Sequence[RankStep]) -> None:
        factors = [row.factor for row in rows if row.factor is not None]
        if not self._factors[0] and len(factors) == len(rows) and max(factors) > (1 + SAME_FACTOR) * min(factors):
            self._factors = tuple(factors), self._step

    def _compare(self, what: str, values: Mapping[int, tuple[object, ...]]) -> None:
        """Notes the first step in which ``what`` is not the same on all ranks."""
        if what in self._differing or not all(values.values()):
            return
        if len({len(each) for each in values.values()}) > 1:
            return  # they hold different models, and are no replicas
        differing = [
            index
            for index, column in enumerate(zip(*values.values()))
            if None not in column
            and any(each != column[0] for each in column)
            and not (what in OF_PARAMETERS and index in self._shards)
        ]
        if not differing:
            self._agreed[what] = self._step
            return
        minority = _minority({rank: tuple(row[index] for index in differing) for rank, row in values.items()})
        columns = [[row[index] for row in values.values()] for index in differing]
        numbers = columns[0] if what == "micro_batches" else []
        self._differing[what] = Disagreement(
            what=what,
            step=self._step,
            agreed=self._agreed.get(what, -1),
            ranks=minority,
            names=tuple(self._names_of(what, differing, values)),
            values=tuple(float(each) for each in numbers if isinstance(each, int)),
            one_bit=what == "weights" and len(columns) == 1 and _is_one_bit(columns[0]),
        )

    def _names_of(self, what: str, indices: Sequence[int], values: Mapping[int, tuple[object, ...]]) -> list[str]:
        if what in OF_PARAMETERS:
            return [self._names[index] for index in indices[:8]]
        if what != "hyperparameters":
            return []
        groups = [dict(row[indices[0]]) for row in values.values()]  # type: ignore[call-overload]
        return sorted(name for name in groups[0] if any(each.get(name) != groups[0][name] for each in groups))

    def _note_alike(self, what: str, values: Mapping[int, Hashable]) -> None:
        known = {rank: value for rank, value in values.items() if value is not None}
        if len(known) < 2:
            return
        value, count = Counter(known.values()).most_common(1)[0]
        ranks = tuple(rank for rank in known if known[rank] == value) if count > 1 else ()
        before = self._alike.get(what)
        self._alike[what] = Coincidence(
            what=what,
            same=(before.same if before else 0) + bool(ranks),
            compared=(before.compared if before else 0) + 1,
            since=before.since if before and before.same else self._step,
            ranks=ranks or (before.ranks if before else ()),
        )

    def _note_missing(self, rows: Sequence[RankStep]) -> None:
        """Parameters that have no gradient on one rank, and one on another."""
        if self._missing[0]:
            return
        everywhere = set.intersection(*(set(row.without_gradient) for row in rows))
        for row in rows:
            if own := [name for name in row.without_gradient if name not in everywhere]:
                self._missing = (tuple(own[:16]), row.rank)
                return

    def _pace(self) -> PaceFacts | None:
        if not self._rows:
            return None
        rows = [rows for rows in self._rows if len(rows) == len(self._rows[-1])]
        own = [statistics.median(row.own_s for row in of_rank) for of_rank in zip(*rows)]
        step_s = statistics.median(row.step_s for each in rows for row in each)
        behind = set.intersection(*(_slow({row.rank: row.own_s for row in each}, step_s) for each in rows))
        if behind and len(rows) == ROWS:  # one is in every row: others may be as slow, but for a hiccup
            behind |= _slow({row.rank: own_s for row, own_s in zip(rows[-1], own)}, step_s)
        else:
            behind = set()
        since = rows[0][0].step
        return PaceFacts(rows=len(rows), own_s=tuple(own), step_s=step_s, behind=tuple(sorted(behind)), since=since)


def _differing(values: Sequence[tuple[int, ...]]) -> set[int]:
    """The columns that are not the same on all ranks; none where ranks hold different models, or nothing."""
    if not all(values) or len({len(each) for each in values}) > 1:
        return set()
    return {index for index, column in enumerate(zip(*values)) if len(set(column)) > 1}


def _slow(own_s: Mapping[int, float], step_s: float) -> set[int]:
    """The ranks that the others wait for, by what each takes by itself."""
    usual = statistics.median_low(own_s.values())
    least = max(MUCH_SLOWER * usual, usual + LEAST_S, usual + SHARE * step_s)
    return {rank for rank, seconds in own_s.items() if seconds > least}


def _minority(values: Mapping[int, Hashable]) -> tuple[int, ...]:
    """The ranks that do not have what most have; () where no value is the most frequent."""
    counts = Counter(values.values()).most_common(2)
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        return ()
    return tuple(rank for rank, value in values.items() if value != counts[0][0])


def _is_one_bit(sums: Sequence[object]) -> bool:
    """Whether two checksums differ by a power of two, as after one flipped bit."""
    first, *others = (each for each in sums if isinstance(each, int))
    return all(is_power_of_two(each - first) for each in others if each != first)


def is_power_of_two(difference: int) -> bool:
    """Whether it is, up to its sign: the sum of integers changes by one when one bit of one of them does."""
    size = abs(difference)
    return size > 0 and size & (size - 1) == 0
