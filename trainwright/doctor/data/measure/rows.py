"""Recognises rows of inputs by their content: what is trained on again and again, and what is evaluated as well."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable, Iterator

import torch
from torch import Tensor, nn

from trainwright.doctor.data.facts import SAME, EvaluatedRows, RowsFacts
from trainwright.doctor.data.measure.changed import ChangedRows
from trainwright.doctor.data.measure.digests import is_continuous, row_digests
from trainwright.doctor.data.measure.phases import Phases
from trainwright.doctor.data.measure.repeats import Repeats, place_of_call
from trainwright.recorder.datasets import length_of
from trainwright.recorder.probes import Probe
from trainwright.recorder.program import Backward, Call, RecordedStep, constants_of, tensors_of
from trainwright.recorder.user_types import Args, Kwargs, Loader
from trainwright.runlog.json_values import Facts, strict

EVERY_STEP, PERIOD, WINDOW = 128, 128, 9
"""Until this step every step is read, then the first WINDOW of every PERIOD: neighbours are compared."""
OFTEN = 32
"""Of the first steps on a CPU so many are compared at once; later those of a window."""
MOST_ROWS = 1 << 16
"""Rows that are remembered."""
CALLS, EVALUATIONS = 64, 8
"""Of an evaluation so many calls are read; so many evaluations are kept."""
READ = 512
"""Rows of a batch that are read; of a larger one those whose digest is a multiple of some number, always the same."""


class InputRows(Probe):
    """Each step that is read takes about 100 us. The digests wait, on a GPU there, for the next look.

    ``urgent``: a batch of a larger set is trained on again and again, for the first time.
    """

    name = RowsFacts.experiment
    closes_late = True
    rests = frozenset({"on_forward"})

    def __init__(self) -> None:
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
        self._loaders: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._source = 0
        self._gap: list[Tensor] = []
        self._gap_calls = 0
        self._evaluations: list[EvaluatedRows] = []
        self._num_evaluations = self._evaluated_at = 0
        self._evaluated: set[int] = set()
        self._phases, self._changed = Phases(), ChangedRows()

    def on_epoch(self, loader: Loader, iterator: object) -> None:
        self._loaders[iterator] = length_of(getattr(loader, "dataset", None)) or 0

    def on_batch(self, iterator: object, ids: object, batch: object, wait_s: float) -> None:
        self._source = self._loaders.get(iterator, 0)

    def on_forward(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if torch.is_grad_enabled():
            self._whole = max(self._whole, self._source)
            self._phases.train()
            if self._place is None and _is_read(self._steps + 1):
                self._place = place_of_call()
        else:
            if not self._gap_calls and self._num_evaluations < 2 * EVALUATIONS:
                self._phases.evaluate()
                self._changed.add(tensors_of((args, kwargs), 3))
            self._gap_calls += 1
            if len(self._gap) < CALLS and self._num_evaluations < 2 * EVALUATIONS:
                digests = row_digests(tensors_of((args, kwargs), 3))
                self._gap += [] if digests is None else [digests]

    def on_closed(self, step: RecordedStep) -> None:
        self._steps = step.step
        self._end_gap()
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

    def _end_gap(self) -> None:
        """Calls without gradients between two steps, where not every step has them, are an evaluation."""
        gap, calls = self._gap, self._gap_calls
        self._gap, self._gap_calls = [], 0
        if not calls:
            return
        self._num_evaluations += 1
        self._evaluated_at = self._steps
        if not gap:
            return
        self._take_waiting()
        by_call = [rows for each in gap if (rows := self._read(each))]
        rows = [row for call in by_call for row in call]
        shares = [sum(row in self._seen for row in call) / len(call) for call in by_call]
        now = EvaluatedRows(
            step=self._steps,
            calls=calls,
            rows=len(rows),
            shared=sum(row in self._seen for row in rows),
            mixed=sum(0.1 < share < 0.9 for share in shares),
            digest=sum(rows) % 2**53,
            again=sum(row in self._evaluated for row in rows),
            distinct=len(set(rows)),
            trained=len(self._seen),
        )
        if len(self._evaluated) < MOST_ROWS:
            self._evaluated.update(rows)
        self._evaluations = [*self._evaluations[-EVALUATIONS + 1 :], now]
        if self._last and self._last[-1] < set(rows):
            self._whole = max(self._whole, len(set(rows)))

    def values(self) -> Facts | None:
        self.urgent = False
        self._take_waiting()
        if not self._rows:
            return None
        every = [*self._evaluations] if 2 * self._num_evaluations <= max(4, self._steps) else []
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
            evaluations=tuple(every),
            num_evaluations=self._num_evaluations if 2 * self._num_evaluations <= max(4, self._steps) else 0,
            evaluated_at=self._evaluated_at,
            is_between=self._phases.is_between,
            are_changed=self._changed.are_of_same_samples(),
        )
        return dict(strict(vars(facts)))


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
