"""Recognises rows of inputs by their content: what is trained on again and again, and what is evaluated as well."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainwright.doctor.data.facts import SAME, EvaluatedPart, EvaluatedRows, RowsFacts
from trainwright.doctor.data.measure.changed import ChangedRows
from trainwright.doctor.data.measure.digests import is_continuous, row_digests
from trainwright.doctor.data.measure.phases import Phases
from trainwright.doctor.data.measure.repeats import Repeats, place_of_call
from trainwright.recorder.comparisons import Site
from trainwright.recorder.datasets import length_of
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import Backward, Call, RecordedStep, constants_of, tensors_of
from trainwright.recorder.user_types import Args, Kwargs, Loader
from trainwright.runlog.json_values import Facts, strict

EVERY_STEP, PERIOD, WINDOW = 128, 128, 9
"""Until this step every step is read, then the first WINDOW of every PERIOD: neighbours are compared."""
OFTEN = 32
"""Of the first steps on a CPU so many are compared at once; later those of a window."""
TRIED = 4
"""Times that the rows of a site are read which nothing has compared with targets."""
MOST_PASSES = 4096
"""Calls between two steps that are counted."""
MOST_ROWS = 1 << 16
"""Rows that are remembered."""
CALLS, EVALUATIONS = 64, 8
"""Calls of an evaluation whose rows are read; evaluations that are kept."""
READ = 512
"""Rows of a batch that are read; of a larger one those whose digest is a multiple of some number, always the same."""


class _Pass(NamedTuple):
    """A call of a model without gradients: where it was made, where its rows come from, and their digests."""

    site: Site
    source: Hashable
    digests: Tensor | None


class _Iterator(NamedTuple):
    """An iterator of a loader, by its number, and the length of its data set."""

    number: int
    length: int


class InputRows(Probe):
    """Each step that is read takes about 100 us. The digests wait, on a GPU there, for the next look.

    ``urgent``: a batch of a larger set is trained on again and again, for the first time.
    """

    name = RowsFacts.experiment
    closes_late = True
    rests = frozenset({"on_forward"})

    def __init__(self, watched: WatchedObjects) -> None:
        self._sites = watched.sites
        self._steps = 0
        self._seen: set[int] = set()
        self._rows = 0
        self._new: deque[float] = deque(maxlen=8)
        self._last: deque[frozenset[int]] = deque(maxlen=WINDOW)
        self._repeats = Repeats()
        self._place: Hashable = None
        self._batch = self._whole = 0
        self._micro = self._micro_steps = 0
        self._next: list[float] = []
        self._far: list[float] = []
        self._partly = 0
        self._is_continuous: bool | None = None
        self._waiting: list[tuple[int, Hashable, list[list[Tensor]], bool]] = []  # are all passes of the same models?
        self._one_of = 0
        self._iterators: weakref.WeakKeyDictionary[object, _Iterator] = weakref.WeakKeyDictionary()
        self._source = 0
        self._passes: list[_Pass] = []  # since the last step
        self._times: Counter[Site] = Counter()  # before how many steps
        self._calls: Counter[Site] = Counter()
        self._num_iterators = 0
        self._fetched_from: _Iterator | None = None  # the iterator of a batch that no model was called with
        self._evaluations: list[EvaluatedRows] = []
        self._num_evaluations = self._evaluated_at = 0
        self._evaluated: set[int] = set()
        self._phases, self._changed = Phases(), ChangedRows()

    def on_epoch(self, loader: Loader, iterator: object) -> None:
        self._num_iterators += 1
        self._iterators[iterator] = _Iterator(self._num_iterators, length_of(getattr(loader, "dataset", None)) or 0)

    def on_batch(self, iterator: object, ids: object, batch: object, wait_s: float) -> None:
        known = self._iterators.get(iterator)
        self._source, self._fetched_from = (0, None) if known is None else (known.length, known)

    def on_forward(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if torch.is_grad_enabled():
            self._whole = max(self._whole, self._source)
            self._phases.train()
            if self._place is None and _is_read(self._steps + 1):
                self._place = place_of_call()
        elif len(self._passes) < MOST_PASSES:
            self._add_pass(tensors_of((args, kwargs), 3), self._sites.current)

    def _add_pass(self, tensors: list[Tensor], site: Site) -> None:
        is_first, digests = not self._calls[site], None
        self._calls[site] += 1
        self._times[site] += is_first
        if self._calls[site] <= CALLS and self._times[site] <= (2 * EVALUATIONS if site in self._sites else TRIED):
            digests = row_digests(tensors)
            if is_first:
                self._phases.add(site)
                self._changed.add(site, tensors)
        source = _base_of(tensors) if self._fetched_from is None else self._fetched_from
        self._passes.append(_Pass(site, source, digests))
        self._fetched_from = None

    def on_closed(self, step: RecordedStep) -> None:
        self._steps = step.step
        self._end_passes()
        place, self._place = self._place, None
        if not _is_read(step.step) or not step.calls:
            return
        passes = [*_by_backward(step)]
        groups = [[each for call in calls for each in _digests_of(call)] for calls in passes]
        if any(groups):
            self._note_source(step.calls[0])
            of_one = all({c.root for c in calls} == {c.root for c in passes[0]} for calls in passes)
            self._waiting.append((step.step, place, groups, of_one))
        is_end = step.step % OFTEN == 0 if step.step <= EVERY_STEP else step.step % PERIOD == WINDOW - 1
        if is_end and self._repeats.longest < SAME - 1 and not any(each.is_cuda for group in groups for each in group):
            self._take_waiting()
            self.urgent = self._repeats.longest >= SAME - 1 and self._whole > self._batch

    def _note_source(self, call: Call) -> None:
        """The rows of a tensor of which the input is a part."""
        tensors = [each.tensor for each in constants_of((call.args, call.kwargs)) if each.tensor.dim()]
        if self._is_continuous is None:
            self._is_continuous = is_continuous(tensors)
        for each in tensors[:4]:
            base = each._base
            if base is not None and base.dim() and base.shape[1:] == each.shape[1:]:
                self._whole = max(self._whole, len(base))

    def _take_waiting(self) -> None:
        for step, place, groups, of_one in self._waiting:
            rows = [[row for digests in group for row in self._read(digests)] for group in groups]
            every = [row for group in rows for row in group]
            self._repeats.add(step, every, place)
            self._add(every)
            if of_one:
                self._note_micro([sorted(group) for group in rows])
        self._waiting = []

    def _read(self, digests: Tensor) -> list[int]:
        """The digests of the rows that are recognised: all, or one of so many as the first batch has too much."""
        self._one_of = self._one_of or max(1, len(digests) // READ)
        read: list[int] = (digests if self._one_of == 1 else digests[digests % self._one_of == 0]).tolist()
        return read

    def _add(self, rows: list[int]) -> None:
        now = frozenset(rows)
        fresh = now - self._seen
        self._rows += len(rows)
        self._new.append(len(fresh) / max(1, len(now)))
        if len(self._seen) < MOST_ROWS:
            self._seen |= fresh
        before = self._last[-1] if self._last else frozenset()
        self._batch = len(rows)
        if len(self._last) == WINDOW:
            self._compare(now, before)
        self._last.append(now)

    def _compare(self, now: frozenset[int], before: frozenset[int]) -> None:
        shared = len(now & before)
        self._next.append(shared)
        self._far.append(sum(len(now & each) for each in list(self._last)[:-1]) / (WINDOW - 1))
        self._partly += 0 < shared < len(now)
        del self._next[:-256], self._far[:-256]

    def _note_micro(self, groups: list[list[int]]) -> None:
        if len(groups) > 1 and groups[0] and all(group == groups[0] for group in groups):
            self._micro = max(self._micro, len(groups))
            self._micro_steps += 1

    def _end_passes(self) -> None:
        """The passes since the last step are over: an evaluation, where their outputs were compared with targets."""
        passes = [each for each in self._passes if each.site in self._sites]
        self._phases.close(passes[-1].site if passes else None)
        self._changed.close(passes[0].site if passes else None)
        self._passes, self._fetched_from = [], None
        self._calls.clear()
        if not passes:
            return
        self._num_evaluations += 1
        self._evaluated_at = self._steps
        self._take_waiting()
        read = [(each, rows) for each in passes if each.digests is not None and (rows := self._read(each.digests))]
        if not read:
            return
        parts: dict[tuple[Site, Hashable], list[list[int]]] = defaultdict(list)
        for each, rows in read:
            parts[each.site, each.source].append(rows)
        every = [row for _, rows in read for row in rows]
        now = EvaluatedRows(
            step=self._steps,
            calls=len(passes),
            rows=len(every),
            digest=sum(set(every)) % 2**53,  # two passes over one set read the same rows as one
            again=sum(row in self._evaluated for row in every),
            distinct=len(set(every)),
            trained=len(self._seen),
            parts=tuple(self._part(rows, has_source=key[1] is not None) for key, rows in parts.items()),
        )
        if len(self._evaluated) < MOST_ROWS:
            self._evaluated.update(every)
        self._evaluations = [*self._evaluations[-EVALUATIONS + 1 :], now]
        if self._last and self._last[-1] < set(every):
            self._whole = max(self._whole, len(set(every)))

    def _part(self, calls: Sequence[list[int]], *, has_source: bool) -> EvaluatedPart:
        rows = [row for call in calls for row in call]
        shares = [sum(row in self._seen for row in call) / len(call) for call in calls]
        return EvaluatedPart(
            calls=len(calls),
            rows=len(rows),
            distinct=len(set(rows)),
            shared=len(self._seen.intersection(rows)),
            mixed=sum(0.1 < share < 0.9 for share in shares),
            has_source=has_source,
        )

    def end(self, error: BaseException | None) -> None:
        self._end_passes()

    def values(self) -> Facts | None:
        self.urgent = False
        self._take_waiting()
        if not self._rows:
            return None
        facts = RowsFacts(
            steps=self._steps,
            rows=self._rows,
            distinct=len(self._seen),
            new_lately=sum(self._new) / len(self._new),
            batch=self._batch,
            same=self._repeats.longest,
            same_to=self._repeats.longest_to,
            same_before=self._repeats.second,
            is_within=self._repeats.is_within,
            whole=self._whole,
            repeated_micro=self._micro,
            repeated_micro_steps=self._micro_steps,
            compared=len(self._next),
            shared_next=sum(self._next) / max(1, len(self._next)),
            shared_far=sum(self._far) / max(1, len(self._far)),
            partly=self._partly,
            is_continuous=bool(self._is_continuous),
            evaluations=tuple(self._evaluations),
            num_evaluations=self._num_evaluations,
            evaluated_at=self._evaluated_at,
            is_between=self._phases.is_between,
            are_changed=self._changed.are_of_same_samples(),
        )
        return dict(strict(vars(facts)))


def _base_of(tensors: Sequence[Tensor]) -> int | None:
    """The tensor that the rows of the first input are a part of; None where they were gathered, or are all there is."""
    first = next((each for each in tensors if each.dim()), None)
    return None if first is None or first._base is None else id(first._base)


def _is_read(step: int) -> bool:
    return step <= EVERY_STEP or step % PERIOD < WINDOW


def _by_backward(step: RecordedStep) -> Iterator[list[Call]]:
    """The calls before each backward pass, after the one before it; those after the last one too.

    Of a step that cannot be run again, all: its optimizer may have called a closure several times.
    """
    if step.blind is not None:
        yield step.calls
        return
    calls: list[Call] = []
    for each in step.program:
        if isinstance(each, Call):
            calls.append(each)
        elif isinstance(each, Backward) and calls:
            yield calls
            calls = []
    if calls:
        yield calls


def _digests_of(call: Call) -> list[Tensor]:
    digests = row_digests([each.tensor for each in constants_of((call.args, call.kwargs)) if each.is_unchanged])
    return [] if digests is None else [digests]
