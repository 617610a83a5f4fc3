"""Compares the reports of all ranks on one step. Without torch, and independent of the transport."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainwright.doctor.facts.ranks import (
    REPLAYED,
    Coincidence,
    Disagreement,
    PaceFacts,
    ProgramDifference,
    RanksFacts,
    RankStatus,
    RankStep,
)

PARAMETER_CHECKSUMS = ("weights", "gradients", "reduced gradients", "moments")
MUST_BE_EQUAL: dict[str, Callable[[RankStep], tuple[object, ...]]] = {
    "weights": lambda row: row.weights,
    "gradients": lambda row: row.gradients,
    "reduced gradients": lambda row: row.reduced,
    "moments": lambda row: row.moments,
    "buffers": lambda row: row.buffers,
    "hyperparameters": lambda row: tuple(tuple(sorted(group.items())) for group in row.groups),
    "micro_batches": lambda row: (row.micro_batches,) if row.step else (),
}
"""Quantities that must be equal on every replica. An empty value was not measured."""
IRRELEVANT_IF_WEIGHTS_AGREE = ("gradients", "reduced gradients", "moments")
"""Quantities whose differences do not matter if the weights after the update agree."""
SAME_FACTOR = 5e-3  # Quotients of norms that differ by less are equal: norms in float32, gradients rounded to bfloat16
VOTES = 3  # Number of ranks that compute the gradients of a batch in a replayed step: its own rank and the next two
MIN_ROWS = 3  # Number of consecutive rows that must show the same slow rank
MIN_STEPS_PER_ROW = 4  # A row's times are medians of at least this many steps
STRAGGLER_RATIO = 1.5  # A straggler takes at least this multiple of the time of the median rank
STRAGGLER_STEP_FRACTION = 0.2  # A straggler takes at least this fraction of a step more than the median rank
STRAGGLER_MIN_S = 0.005  # A straggler takes at least this many seconds more than the median rank


class Comparison:
    """The comparison of the ranks so far. ``names`` are the names of the folded checksums."""

    def __init__(self, size: int, names: Sequence[str]) -> None:
        self._facts, self._names = RanksFacts(size=size), list(names)
        self._agreed: dict[str, int] = {}
        self._differing: dict[str, Disagreement] = {}
        self._suspected: dict[str, Disagreement] = {}  # until the next weights are known
        self._alike: dict[str, Coincidence] = {}
        self._programs: dict[str, ProgramDifference] = {}
        self._shrunk: list[int] = []
        self._rows: deque[Sequence[RankStep]] = deque(maxlen=MIN_ROWS)
        self._begin: Sequence[RankStep] = ()
        self._shards: frozenset[int] = frozenset()  # sharded parameters
        self._is_divided = False

    def _set(self, **changes: Any) -> None:
        self._facts = replace(self._facts, **changes)

    def add(self, rows: Sequence[RankStep]) -> None:
        """Adds the rows of one step, one for each present rank, in the order of the ranks."""
        if rows[0].step == 0:
            self._begin = rows
            return
        if self._begin:
            self._infer_replicas(self._begin, rows)
            self._begin = ()
        facts, step = self._facts, rows[0].step
        self._set(
            newest=step, compared=facts.compared + 1, are_reduced=facts.are_reduced or all(r.reduced for r in rows)
        )
        for what in PARAMETER_CHECKSUMS if self._is_divided else MUST_BE_EQUAL:
            self._compare(what, rows)
            # if the weights agree, other differences are no fault: each rank updates a part of the weights
            if what == "weights" and self._suspected:
                self._differing |= self._suspected if what in self._differing else {}
                self._suspected = {}
        if self._is_divided:
            return
        self._set(is_wrapped=facts.is_wrapped or any(row.exchange.wrapped_calls for row in rows))
        if facts.exchange is None and "gradients" in (self._suspected | self._differing):
            self._set(exchange=min((r.exchange for r in rows), key=lambda each: (each.last_synced, each.synced_calls)))
        self._record_programs(rows)
        self._compare_replays(rows)
        factors = [row.factor for row in rows if row.factor is not None]
        if not facts.factors and len(factors) == len(rows) and max(factors) > (1 + SAME_FACTOR) * min(factors):
            self._set(factors=tuple(factors), factors_since=step)
        if facts.summed_since is None and all(row.summed for row in rows):
            self._set(summed_since=step)
        if all(row.shrunk for row in rows):
            self._shrunk.append(step)
        if len(rows) == facts.size:  # a subset of the ranks does not show how the data are divided
            self._record_coincidence(
                "samples", {r.rank: frozenset(r.samples) if r.batch is None else r.batch for r in rows}
            )
            # ranks with the same samples compute parts of each sample, and may use the same random numbers
            if not all(row.samples and row.samples == rows[0].samples for row in rows):
                self._record_coincidence("random numbers", {row.rank: row.rng if row.draws else None for row in rows})
        everywhere = set.intersection(*(set(row.without_gradient) for row in rows))
        for row in rows if not facts.missing else ():
            if own := tuple(name for name in row.without_gradient if name not in everywhere):
                self._set(missing=own[:16], missing_on=row.rank)
        if min(row.steps for row in rows) >= MIN_STEPS_PER_ROW:
            self._rows.append(rows)

    def facts(self, present: Sequence[int], statuses: Sequence[RankStatus]) -> RanksFacts:
        """Returns the facts so far."""
        is_usual = len(self._shrunk) >= 2 and 2 * len(self._shrunk) >= self._facts.compared
        return replace(
            self._facts,
            present=tuple(present),
            disagreements=tuple(self._differing.values()),
            coincidences=tuple(self._alike.values()),
            programs=tuple(self._programs.values()),
            shrunk_since=self._shrunk[0] if is_usual else None,
            statuses=tuple(statuses),
            pace=self._pace(),
        )

    def _infer_replicas(self, begin: Sequence[RankStep], rows: Sequence[RankStep]) -> None:
        """Infers from the first gradients which parameters are replicas. The others are shards.

        DistributedDataParallel marks replicas. Without it, a parameter with different initial values is a replica only
        if its gradients were combined over the ranks. In a model with such shards, or whose forward pass communicates
        (tensor, sequence, expert, pipeline parallelism), a parameter with different gradients is also a shard.
        """
        if len(begin) != len(rows):
            return
        apart, unlike = _columns_apart([row.weights for row in begin]), _columns_apart([row.gradients for row in rows])
        if not any(row.exchange.wrapped_calls for row in rows):
            reduced = {n for n, each in enumerate(rows[0].gradients) if each and n not in unlike}
            shards, divides = apart - reduced, any(row.divides for row in rows)
            self._shards = frozenset(shards | unlike if shards or divides else ())
            self._is_divided = bool(self._shards) or divides
        self._compare("weights", begin)

    def _compare(self, what: str, rows: Sequence[RankStep]) -> None:
        """Records the first step in which ``what`` differs between ranks."""
        values = {row.rank: MUST_BE_EQUAL[what](row) for row in rows}
        if what in self._differing or not all(values.values()) or len({len(each) for each in values.values()}) > 1:
            return  # not measured, or different models
        differing = sorted(
            _columns_apart([*values.values()]) - (self._shards if what in PARAMETER_CHECKSUMS else set())
        )
        if not differing:
            self._agreed[what] = rows[0].step
            return
        columns = [[row[index] for row in values.values()] for index in differing]
        found = Disagreement(
            what=what,
            step=rows[0].step,
            agreed=self._agreed.get(what, -1),
            ranks=_minority({rank: tuple(row[index] for index in differing) for rank, row in values.items()}),
            names=tuple(self._names_of(what, differing, [*values.values()])),
            source=rows[0].schedule if what == "hyperparameters" else "",
            one_bit=what == "weights" and len(columns) == 1 and _is_one_bit(columns[0]),
        )
        if what in IRRELEVANT_IF_WEIGHTS_AGREE and "weights" not in self._differing:
            self._suspected.setdefault(what, found)
        else:
            self._differing[what] = found

    def _compare_replays(self, rows: Sequence[RankStep]) -> None:
        """Records the first step in which one rank computed other gradients from a batch than two other ranks did.

        With two ranks, each batch is computed twice by its own rank and once by the other rank. If each rank repeats
        its own gradients but the ranks differ, either rank may be wrong. If several ranks differ in another way,
        nothing is recorded, because the program is not deterministic.
        """
        size, step = len(rows), rows[0].step
        is_measured = size == self._facts.size and all(len(row.replayed) == VOTES for row in rows)
        if not is_measured or len({row.processor for row in rows}) > 1 or REPLAYED in self._differing:
            return
        guilty: set[int] = set()
        apart: set[int] = set()
        repeats = True
        for row in rows:
            votes = [((row.rank + n) % size, rows[(row.rank + n) % size].replayed[n]) for n in range(VOTES)]
            usual, count = Counter(sums for _, sums in votes).most_common(1)[0]
            repeats &= count > 1
            wrong = [each for each in votes if each[1] != usual] if count > 1 else votes if size > 2 else votes[:1]
            guilty.update(rank for rank, _ in wrong)
            apart |= _columns_apart([sums for _, sums in votes])
        if not guilty:
            self._agreed[REPLAYED] = step
        if len(guilty) == 1 or (guilty and size == 2 and repeats):
            self._differing[REPLAYED] = Disagreement(
                what=REPLAYED,
                step=step,
                agreed=self._agreed.get(REPLAYED, -1),
                ranks=tuple(guilty) if len(guilty) == 1 else (),
                names=tuple(self._names[index] for index in sorted(apart, reverse=True)[:8]),
            )

    def _names_of(self, what: str, indices: Sequence[int], values: Sequence[tuple[Any, ...]]) -> list[str]:
        if what in PARAMETER_CHECKSUMS:
            return [self._names[index] for index in indices[:8]]
        if what != "hyperparameters":
            return []
        groups = [dict(row[indices[0]]) for row in values]
        return sorted(name for name in groups[0] if any(each.get(name) != groups[0][name] for each in groups))

    def _record_programs(self, rows: Sequence[RankStep]) -> None:
        for what in rows[0].program:
            words = tuple(row.program.get(what, "") for row in rows)
            if all(words) and len(set(words)) > 1:
                before = self._programs.get(what)
                since, count = (before.since, before.rows) if before else (rows[0].step, 0)
                self._programs[what] = ProgramDifference(what=what, since=since, rows=count + 1, words=words)

    def _record_coincidence(self, what: str, values: Mapping[int, Hashable]) -> None:
        known = {rank: value for rank, value in values.items() if value}
        if len(known) < 2:
            return
        value, count = Counter(known.values()).most_common(1)[0]
        ranks = tuple(rank for rank in known if known[rank] == value) if count > 1 else ()
        before = self._alike.get(what)
        self._alike[what] = Coincidence(
            what=what,
            same=(before.same if before else 0) + bool(ranks),
            compared=(before.compared if before else 0) + 1,
            since=before.since if before and before.same else self._facts.newest,
            ranks=ranks or (before.ranks if before else ()),
        )

    def _pace(self) -> PaceFacts | None:
        rows = [rows for rows in self._rows if len(rows) == len(self._rows[-1])]
        if len(rows) < MIN_ROWS:
            return None
        own = [statistics.median(row.own_s for row in of_rank) for of_rank in zip(*rows)]
        step_s = statistics.median(row.step_s for each in rows for row in each)
        behind = set.intersection(*(_slow({row.rank: row.own_s for row in each}, step_s) for each in rows))
        if behind:  # a rank is slow in every row: add ranks that are slow by their median
            behind |= _slow({row.rank: own_s for row, own_s in zip(rows[-1], own)}, step_s)
        return PaceFacts(own_s=tuple(own), step_s=step_s, behind=tuple(sorted(behind)), since=rows[0][0].step)


def _columns_apart(values: Sequence[tuple[object, ...]]) -> set[int]:
    """Returns the columns that differ between ranks; an empty set if ranks hold different models, or have no values."""
    if not all(values) or len({len(each) for each in values}) > 1:
        return set()
    return {n for n, column in enumerate(zip(*values)) if None not in column and len(set(column)) > 1}


def _slow(own_s: Mapping[int, float], step_s: float) -> set[int]:
    """Returns the ranks that the others wait for, by the time outside of communication."""
    usual = statistics.median_low(own_s.values())
    least = max(STRAGGLER_RATIO * usual, usual + STRAGGLER_MIN_S, usual + STRAGGLER_STEP_FRACTION * step_s)
    return {rank for rank, seconds in own_s.items() if seconds > least}


def _minority(values: Mapping[int, Hashable]) -> tuple[int, ...]:
    """Returns the ranks that differ from the majority; () without a most frequent value."""
    counts = Counter(values.values()).most_common(2)
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        return ()
    return tuple(rank for rank, value in values.items() if value != counts[0][0])


def _is_one_bit(sums: Sequence[object]) -> bool:
    """Returns True if checksums differ by a power of two, as after one flipped bit."""
    first, *others = (each for each in sums if isinstance(each, int))
    return all(is_power_of_two(each - first) for each in others if each != first)


def is_power_of_two(difference: int) -> bool:
    """Returns True for a power of two of either sign. A flipped bit changes a sum of integers by such a number."""
    size = abs(difference)
    return size > 0 and size & (size - 1) == 0
