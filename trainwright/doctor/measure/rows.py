"""Identifies input rows by content: repeated batches, and rows in both training and evaluation."""

from __future__ import annotations

import inspect
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from trainwright.doctor.facts.data import MIN_SAME_STEPS, EvaluatedRows, RowsFacts
from trainwright.doctor.measure.datasets import length_of
from trainwright.doctor.measure.epochs import shuffles
from trainwright.doctor.measure.evaluations import source_of
from trainwright.recorder.callers import caller
from trainwright.recorder.comparisons import Site
from trainwright.recorder.plain_tensors import plain
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import RecordedStep, tensors_of
from trainwright.recorder.user_types import Args, Kwargs, Loader

MAX_COLUMNS_READ = 64  # Number of evenly spread elements that are read from wider rows
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def row_digests(tensors: Sequence[Tensor]) -> Tensor | None:
    """Returns a digest of each row (N,), over all tensors with as many rows as the first; None without rows."""
    rows = [each.detach() for each in plain(tensors) if each.dim() and each.numel()]
    total: Tensor | None = None
    for place, each in enumerate(rows[:4]):
        if len(each) == len(rows[0]) and each.itemsize in _INTEGERS:
            part = _digests(each)
            total = part if total is None else total + part * _weights(each.device)[place] * ~_counts_up(each)
    return total


def _counts_up(tensor: Tensor) -> Tensor:
    """Returns a 0-d bool: True if the tensor numbers rows, or groups of rows, from 0. Row numbers are not content."""
    if tensor.dim() > 1 or tensor.is_floating_point() or tensor.dtype == torch.bool:
        return torch.zeros((), dtype=torch.bool, device=tensor.device)
    return (tensor[0] == 0) & (tensor[1:] >= tensor[:-1]).all()


def _digests(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(len(tensor), -1) if tensor.dim() != 2 else tensor
    width = flat.shape[1]
    if width > MAX_COLUMNS_READ:
        flat = flat[:, :: width // MAX_COLUMNS_READ][:, :MAX_COLUMNS_READ]
    bits = flat.resolve_conj().resolve_neg().contiguous().view(_INTEGERS[flat.itemsize])
    return (bits * _weights(tensor.device)[: bits.shape[1]]).sum(1)  # int64, as the factors are


@cache
def _weights(device: torch.device) -> Tensor:
    """Returns odd random factors."""
    generator = torch.Generator().manual_seed(7)
    return (torch.randint(-(2**62), 2**62, (MAX_COLUMNS_READ,), generator=generator, device="cpu") * 2 + 1).to(device)


def is_continuous(tensors: Sequence[Tensor]) -> bool:
    """Returns True if the first rows contain fractional numbers, so that two samples are not equal by chance."""
    floats = [each.detach()[:4].double() for each in plain(tensors) if each.dim() and each.is_floating_point()]
    return any(bool((each != each.round()).sum() > 4) for each in floats)


MIN_WINDOW = 12  # Values of the shortest window
MIN_VALUES, MIN_FRACTIONAL = 8, 6
"""Minimum number of values in a part of a window, and of fractional values that differ from the previous one."""
MAX_PARTS_PER_CALL = 128
PARTS_EVERY = 4  # Interval in steps


@torch.no_grad()
def window_parts(tensors: Sequence[Tensor]) -> Tensor | None:
    """Returns digests (rows, places) of the parts of windows, 0 for parts without information; None without windows.

    A part is as many consecutive time steps as have ``MIN_VALUES`` values. Windows that overlap contain the same parts
    at different places.
    """
    x = next((each.detach() for each in plain(tensors) if each.dim() and each.is_floating_point()), None)
    if x is None or x.dim() not in (2, 3) or not len(x) or x[0].numel() < MIN_WINDOW:
        return None
    steps = x.unsqueeze(2) if x.dim() == 2 else x.transpose(1, 2) if x.shape[2] > x.shape[1] else x
    length = -(-MIN_VALUES // steps.shape[2])
    if steps.shape[1] < length + 2:
        return None
    windows = steps.unfold(1, length, 1).transpose(2, 3)
    parts = windows.reshape(-1, length * steps.shape[2])
    whole, same = parts == parts.round(), torch.zeros_like(parts, dtype=torch.bool)
    same[:, 1:] = parts[:, 1:] == parts[:, :-1]
    is_distinct = (~(whole | same)).sum(1) >= MIN_FRACTIONAL
    return torch.where(is_distinct, _digests(parts), 0).view(windows.shape[:2])


EVERY_STEP_UNTIL = 128
"""All steps until this one are read. Later, every INTERVAL_STEPS-th step and the step after it are."""
INTERVAL_STEPS = 32
STEPS_PER_COMPARISON = 8  # Steps on a CPU that are compared together. Steps on a GPU wait for the next examination.
MAX_CALLS_PER_STEP = 8
MAX_ROWS = 1 << 16
MAX_BATCHES = 4096
MAX_ROWS_PER_BATCH = 256  # Larger batches are sampled: rows whose digest is a multiple of a fixed number are read
MIN_URGENT_ROWS, MAX_NEW = 4, 0.05
"""Minimum number of evaluated training rows for an immediate report, and maximum fraction of new rows for it."""
MAX_CALLS_PER_EVALUATION = 64
MAX_EVALUATIONS_PER_SITE = 8
MAX_READS_WITHOUT_TARGETS = 4
"""Number of passes at one call site that are read although their outputs are never compared with targets."""


@dataclass
class _Source:
    """An iterator of a loader. ``length`` is that of the dataset; ``workers`` is 0 unless it is an IterableDataset."""

    number: int
    length: int
    shuffles: bool
    workers: int
    line: str | None
    fetched: int = 0


@dataclass
class _Read:
    """Digests of the rows of one forward call. Its input is batch number ``place`` of the source.

    ``part``: the number of backward passes in the step before the call, and the model.
    """

    call: int
    step: int
    part: tuple[int, int]
    digests: Tensor
    parts: Tensor | None
    source: _Source | None
    place: int


class InputRows(Probe):
    """Reads the rows of calls, about 50 us per call. ``urgent``: batches repeat, or training rows are evaluated."""

    name = RowsFacts.experiment
    observes_every_step = True

    def __init__(self, watched: WatchedObjects) -> None:
        self._sites, self._values_of_loop = watched.sites, watched.values
        self._shapes: set[tuple[int, ...]] = set()  # of the newest inputs
        whole = max((length_of(getattr(each, "dataset", None)) or 0 for each in watched.loaders), default=0)
        self._found = RowsFacts(whole=whole)
        self._mode: bool | None = None  # mode of the first model that was trained
        self._calls = self._in_step = self._backwards = self._one_of = 0
        self._waiting: list[_Read] = []
        self._seen: set[int] = set()
        self._new: deque[float] = deque(maxlen=8)
        # (model, hash of its rows) for each call, by the number of backward passes before it
        self._of_step: dict[int, list[tuple[int, int]]] = {}
        self._step = self._last = self._now = 0
        self._runs = [0]  # lengths of the two longest runs of equal steps that have ended
        self._varies = False
        self._last_rows: set[int] = set()
        self._at: dict[int, int] = {}
        self._period = self._recurred = 0
        self._fetches = self._fetched_at = 0  # number of fetches; number of training calls at the newest fetch
        self._before_group = 0
        self._group: list[int] = []
        self._iterators: weakref.WeakKeyDictionary[object, _Source] = weakref.WeakKeyDictionary()
        self._num_iterators = 0
        self._newest: _Source | None = None
        self._is_fresh = False  # the newest batch was not passed to a model yet
        # passes since the last step: site, source, digests of rows and of parts of windows
        self._passes: list[tuple[Site, Hashable, Tensor | None, Tensor | None]] = []
        self._places: dict[int, int] = {}  # place in its window, by digest of a part
        self._one_part_of = 0
        self._times: Counter[Site] = Counter()
        self._is_reported = self._is_overlap_reported = False

    def on_epoch(self, loader: Loader, iterator: object) -> None:
        self._begin_source(loader, iterator)
        self._group = []

    def _begin_source(self, loader: Any, iterator: object) -> _Source:
        dataset = getattr(loader, "dataset", None)
        workers = loader.num_workers if isinstance(dataset, IterableDataset) else 0
        self._num_iterators += 1
        source = _Source(self._num_iterators, length_of(dataset) or 0, shuffles(loader), workers, caller())
        self._iterators[iterator] = source
        return source

    def on_batch(self, iterator: object, ids: object, batch: object, wait_s: float) -> None:
        source = self._iterators.get(iterator)
        if source is None:  # the iterator was created before the watch began
            source = self._begin_source(_loader_of(iterator), iterator)
        source.fetched += 1
        self._newest, self._is_fresh = source, True
        if torch.is_grad_enabled():
            self._fetches += self._fetched_at != self._calls or not self._fetches
            self._fetched_at = self._calls

    def on_forward(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if not torch.is_grad_enabled():
            self._add_pass(tensors_of((args, kwargs), 3))
            return
        if self._mode is None:
            self._mode = root.training
        if self._mode and not root.training:
            return  # an evaluation without no_grad
        self._calls += 1
        self._in_step += 1
        number = self._found.steps + 1
        if (number <= EVERY_STEP_UNTIL or number % INTERVAL_STEPS < 2) and self._in_step <= MAX_CALLS_PER_STEP:
            self._read_call(tensors_of((args, kwargs), 3), number, id(root))
        self._is_fresh = False

    def on_backward(self, losses: tuple[Tensor, ...], options: Kwargs) -> None:
        self._backwards += 1

    def on_closure_again(self, optimizer: Optimizer) -> None:
        self._in_step = MAX_CALLS_PER_STEP  # the optimizer evaluates one batch several times

    def _read_call(self, tensors: Sequence[Tensor], step: int, model: int) -> None:
        digests = row_digests(tensors)
        if digests is None:
            return
        if not self._waiting and not self._at:
            self._found.is_continuous = is_continuous(tensors)
            self._found.are_codes = all(each.dim() < 2 and not each.is_floating_point() for each in tensors)
        self._shapes = {tuple(each.shape) for each in tensors}
        source = self._newest if self._is_fresh else None
        self._found.whole = max(self._found.whole, source.length if source else _rows_of_base(tensors))
        place = source.fetched if source is not None else 0
        parts = window_parts(tensors) if step % PARTS_EVERY == 0 else None
        self._waiting.append(_Read(self._calls, step, (self._backwards, model), digests, parts, source, place))

    def _add_pass(self, tensors: Sequence[Tensor]) -> None:
        site, digests, parts = self._sites.current, None, None
        self._times[site] += all(site != each[0] for each in self._passes)
        if len(self._passes) < MAX_CALLS_PER_EVALUATION and self._times[site] <= (
            2 * MAX_EVALUATIONS_PER_SITE if site in self._sites else MAX_READS_WITHOUT_TARGETS
        ):
            digests, parts = row_digests(tensors), window_parts(tensors)
        if len(self._passes) <= MAX_CALLS_PER_EVALUATION:
            source = self._newest.number if self._is_fresh and self._newest else _base_of(tensors)
            self._passes.append((site, source, digests, parts))
        self._is_fresh = False

    def on_closed(self, step: RecordedStep) -> None:
        self._found.steps, self._in_step, self._backwards = step.step, 0, 0
        self._end_passes()
        if len(self._waiting) >= STEPS_PER_COMPARISON and not self._waiting[0].digests.is_cuda:
            self._take_waiting()

    def _take_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            rows = self._values(each.digests)
            key, fresh = hash(tuple(rows)), set(rows) - self._seen
            if each.step != self._step:
                self._end_step(each.step)
            self._of_step.setdefault(each.part[0], []).append((each.part[1], key))
            # a batch of equal rows may recur by chance: random walks, for example, may all start from one row
            self._varies |= len(set(rows)) > 1 or len(rows) == 1
            if each.parts is not None and len(self._places) < MAX_ROWS:
                self._places |= self._parts_of(each.parts)
            self._compare_before(each.call, key)
            self._compare_workers(each, key)
            self._found.batch, self._last_rows = len(rows), set(rows)
            self._new.append(len(fresh) / max(1, len(set(rows))))
            if len(self._seen) < MAX_ROWS:
                self._seen |= fresh
        found = self._found
        repeats = found.same >= MIN_SAME_STEPS - 1 or found.equal_groups >= 4 or found.recurred >= MIN_SAME_STEPS
        self.urgent = self.urgent or (repeats and not self._is_reported)
        self._is_reported |= repeats

    def _values(self, digests: Tensor) -> list[int]:
        self._one_of = self._one_of or max(1, len(digests) // MAX_ROWS_PER_BATCH)
        values: list[int] = (digests if self._one_of == 1 else digests[digests % self._one_of == 0]).tolist()
        return values

    def _end_step(self, step: int) -> None:
        """Compares the rows of a step with those of the previous step, and its micro-batches with each other."""
        parts, self._of_step, found = [*self._of_step.values()], {}, self._found
        if len(parts) > 1 and all(each == parts[0] for each in parts):
            found.micro, found.micro_steps = max(found.micro, len(parts)), found.micro_steps + 1
        key = hash(tuple(key for part in parts for _, key in part))
        if parts and key == self._last and self._varies:
            self._now += 1
        elif parts:
            self._runs, self._now = sorted([*self._runs, self._now])[-2:], 0
        if self._now > found.same:
            found.same, found.same_to = self._now, self._step
        found.same_before = sorted([*self._runs, self._now])[-2]
        self._last, self._step, self._varies = key if parts else self._last, step, False

    def _compare_before(self, call: int, key: int) -> None:
        """Detects batches that recur with a period."""
        lag = call - self._at.get(key, call)
        if lag and lag == self._period:
            self._recurred += 1
        else:
            self._period, self._recurred = lag, int(lag > 0)
        source, unfetched, found = self._newest, self._calls - self._fetched_at, self._found
        is_kept = source is not None and source.shuffles and unfetched >= self._recurred
        is_kept = is_kept and 2 * self._fetches >= self._period
        longest = max((found.recurred, found.period, found.is_kept), (self._recurred, self._period, is_kept))
        found.recurred, found.period, found.is_kept = longest
        if key in self._at or len(self._at) < MAX_BATCHES:
            self._at[key] = call

    def _compare_workers(self, read: _Read, key: int) -> None:
        """Detects workers that yield the same batches."""
        source = read.source
        if source is None or source.workers < 2:
            return
        if (read.place - 1) % source.workers == 0:
            self._group = []
        self._group.append(key)
        if len(self._group) == source.workers and self._group[0] != self._before_group:
            self._found.groups += 1
            self._found.equal_groups += len(set(self._group)) == 1
            self._before_group = self._group[0]

    def _end_passes(self) -> None:
        """Ends the passes since the last step. Passes whose outputs were compared with targets are an evaluation."""
        if not self._passes:
            return
        passes, self._passes = [each for each in self._passes if each[0] in self._sites], []
        sets: dict[tuple[Site, Hashable], list[list[int]]] = defaultdict(list)
        windows: dict[tuple[Site, Hashable], dict[int, int]] = defaultdict(dict)
        self._take_waiting()
        for site, source, digests, parts in passes:
            if digests is not None:
                sets[site, source].append(self._values(digests))
                windows[site, source] |= {} if parts is None else self._parts_of(parts)
        if not sets:
            return
        every = {row for calls in sets.values() for call in calls for row in call}
        if self._last_rows and self._last_rows < every:
            self._found.whole = max(self._found.whole, len(every))
        seen = [self._overlap(calls, windows[key], key[0], key[1] is not None) for key, calls in sets.items()]
        last = self._found.evaluated = max(seen, key=lambda each: (each.is_partial, each.shared, each.moved_parts))
        is_overlap = last.is_partial and last.shared >= MIN_URGENT_ROWS and sum(self._new) <= MAX_NEW * len(self._new)
        self.urgent = self.urgent or (is_overlap and not self._is_overlap_reported)
        self._is_overlap_reported |= is_overlap

    def _parts_of(self, parts: Tensor) -> dict[int, int]:
        """Returns the place in the window of some parts, by their digest."""
        flat = parts.flatten().cpu()
        self._one_part_of = self._one_part_of or max(1, len(flat) // MAX_PARTS_PER_CALL)
        chosen = ((flat != 0) & (flat % self._one_part_of == 0)).nonzero().flatten()
        return dict(zip(flat[chosen].tolist(), (chosen % parts.shape[1]).tolist()))

    def _overlap(
        self, calls: Sequence[list[int]], parts: Mapping[int, int], site: Site, has_source: bool
    ) -> EvaluatedRows:
        """Returns facts on evaluated rows. Without a known source, several sets may have been evaluated in turn."""
        rows = [row for call in calls for row in call]
        fractions = [sum(row in self._seen for row in call) / max(1, len(call)) for call in calls]
        mixed = sum(0.1 < each < 0.9 for each in fractions)
        repeated = {row for row, number in Counter(rows).items() if number > 1}
        return EvaluatedRows(
            rows=len(rows),
            distinct=len(set(rows)),
            shared=len(self._seen.intersection(rows)),
            repeated=len(repeated),
            shared_repeated=len(self._seen & repeated),
            trained=len(self._seen),
            parts=len(parts),
            moved_parts=sum(self._places.get(part, place) != place for part, place in parts.items()),
            is_one_set=has_source or (mixed > 0 and (len(calls) < 4 or mixed > 2)),
            source=source_of(site),
        )

    def end(self, error: BaseException | None) -> None:
        self._end_passes()

    def facts(self) -> RowsFacts | None:
        self._take_waiting()
        self.urgent = False
        if not self._new:
            return None
        found = self._found
        found.distinct, found.new_lately = len(self._seen), sum(self._new) / len(self._new)
        if found.same >= MIN_SAME_STEPS - 1 and found.whole <= found.batch and not self._num_iterators:
            found.unread = next(filter(None, map(self._yields_such_batches, self._values_of_loop())), "")
        if self._newest is not None:
            found.workers, found.source = self._newest.workers, self._newest.line
        return found

    def _yields_such_batches(self, value: object) -> str:
        """Returns a description of a loader or a suspended generator that yields batches like the newest; else ""."""
        length, size = length_of(getattr(value, "dataset", None)) or 0, self._found.batch
        if length > size == getattr(value, "batch_size", None):
            return f"a {type(value).__name__} of {length} samples"
        if inspect.isgenerator(value) and inspect.getgeneratorstate(value) == inspect.GEN_SUSPENDED:
            local, code = inspect.getgeneratorlocals(value), value.gi_code
            shapes = {name: tuple(getattr(each, "shape", ())) for name, each in local.items()}
            larger = any(a[1:] == b[1:] and a[:1] > b[:1] for a in shapes.values() if a for b in self._shapes)
            made = {shapes.get(name) for name in code.co_varnames[code.co_argcount :]}  # an argument may be the set
            is_sized = any(type(each) is int and each == size for each in local.values()) and bool(made & self._shapes)
            return f"{value.__name__}()" if larger or is_sized else ""
        return ""


def _loader_of(iterator: Any) -> SimpleNamespace:
    """Returns dataset, sampler and number of workers of an iterator's loader."""
    sampler = getattr(getattr(iterator, "_index_sampler", None), "sampler", None)
    dataset, workers = getattr(iterator, "_dataset", None), getattr(iterator, "_num_workers", 0)
    return SimpleNamespace(dataset=dataset, sampler=sampler, num_workers=workers)


def _rows_of_base(tensors: Sequence[Tensor]) -> int:
    """Returns the number of rows of the tensor that an input is a slice of; 0 without one."""
    bases = [(each, each._base) for each in tensors[:4] if each.dim()]
    return max((len(base) for each, base in bases if base is not None and base.shape[1:] == each.shape[1:]), default=0)


def _base_of(tensors: Sequence[Tensor]) -> int | None:
    first = next((each for each in tensors if each.dim()), None)
    return None if first is None or first._base is None else id(first._base)
