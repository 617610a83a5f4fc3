"""The stream of step batches, in the order of the user's sampler, or ordered by (seed, epoch, position)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import replace
from itertools import chain, count, islice
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset

from trainwright.checkpoint.batch_cut import rows_of_rank
from trainwright.checkpoint.cursor import BadSample, Cursor, Ids, MicroBatch, StepBatch
from trainwright.data.fetch import (
    AnyDataset,
    Batch,
    Failed,
    Fetch,
    Fetched,
    FetchStream,
    Key,
    is_sliced,
    keys_of_rank,
)
from trainwright.data.fetch import (
    Loading as Loading,
)
from trainwright.data.read_files import FilesOrder, OpenFiles
from trainwright.data.ready_batches import ReadyBatches, ReadyStream, Say, comparison_message, silent
from trainwright.data.sample_order import UserOrder, epoch_order, regrouped
from trainwright.data.unwrap import length_of
from trainwright.data.workers import read_in_workers
from trainwright.errors import DataError, UsageError

AT_ONCE, AT_ONCE_BYTES = 32, 2**20
"""Maximum number of steps whose batches are made together from tensors in memory, and their maximum total size."""

MIN_LENGTH_ERROR = 0.05
"""Relative error of the length of an epoch above which it is reported."""


class StepBatches:
    """Iterates over the StepBatches of a dataset, epoch after epoch, until ``loading.epochs`` or an empty epoch.

    Iteration starts at ``cursor``. The default order visits each sample once per epoch. With ``drop_last`` a short last
    step is dropped. A sample in quarantine is left out of its micro-batch; no other sample moves. An empty micro-batch
    or step is skipped; if all are empty, the stream ends.

    ``resumed`` is a message on how the stream reached ``cursor``. It is set after the first batch, if ``cursor`` is
    within an epoch and a sampler or ready-made batches determine the order. ``say`` is called with progress messages.

    Raises DataError for an unreadable sample that is not quarantined, and if no sample is left.
    """

    def __init__(
        self, dataset: AnyDataset, loading: Loading, *, cursor: Cursor | None = None, say: Say = silent
    ) -> None:
        self.dataset = dataset
        self.loading = loading
        self.cursor = cursor or Cursor()
        self.say = say
        self.resumed = ""
        self._start = self.cursor.start if self.cursor.position else None
        self._has_steps = False  # True if the last planned epoch has any
        self._has_wrong_length = False

    def __iter__(self) -> Iterator[StepBatch]:
        steps = self._ready() if isinstance(self.dataset, ReadyBatches) else self._read()
        return _read_ahead(steps, self.at_once)

    @property
    def reads_in_workers(self) -> bool:
        """True if worker processes read the samples. Ready-made batches come from the user's iterator."""
        return self.loading.workers > 0 and not isinstance(self.dataset, ReadyBatches)

    @property
    def depends_on_training(self) -> bool:
        """True if the order may depend on the training so far, so that reading ahead is not allowed."""
        order = self.loading.loader or self.loading.order
        return order is not None and not order.is_pure

    @property
    def at_once(self) -> int:
        """Number of steps that are read together: more than 1 only for batches of tensors in memory."""
        loading = self.loading
        if isinstance(self.dataset, ReadyBatches):  # batches of a list are not copied, unless to another device
            return AT_ONCE if self.dataset.are_in_memory and loading.device.type == "cpu" else 1
        if loading.workers or self.depends_on_training or not is_sliced(self.dataset, loading.collate):
            return 1
        sample_bytes: int = sum(tensor[:1].nbytes for tensor in self.dataset.tensors)
        return max(1, min(AT_ONCE, AT_ONCE_BYTES // max(1, sample_bytes * loading.batch_size)))

    def _ready(self) -> Iterator[StepBatch | None]:
        """Yield the steps, and None after the last one of an epoch."""
        loading = self.loading
        stream = ReadyStream(self.dataset, self.cursor, loading, self.say)
        for step in stream.steps():
            if step is None:
                self._compare_length(self.dataset.kind, self.dataset.size, stream.number, "batches")
                yield None
                continue
            (batches, cursor), of_all = step, None
            self.resumed = stream.resumed
            if loading.ranks > 1:
                of_all = np.concatenate([batch.ids for batch in batches])
                batches = [_rows_of_this_rank(batch, loading) for batch in batches]
            if loading.device.type != "cpu":
                batches = [MicroBatch(to_device(batch.data, loading.device), batch.ids) for batch in batches]
            yield StepBatch(tuple(batches), cursor, of_all=of_all)

    def _read(self) -> Iterator[StepBatch | None]:
        """Yield the steps, and None after an epoch of a map-style dataset that is read in this process."""
        window: list[MicroBatch] = []
        bad: list[BadSample] = []  # of this step and of empty steps before it
        found: set[int] = set()
        read_s = 0.0
        for fetched in self._fetched(found):
            if fetched is None:
                yield None
                continue
            if isinstance(fetched, Failed):
                raise fetched.error()
            if fetched.bad:
                bad += fetched.bad
                found.update(each.id for each in fetched.bad)
            read_s += fetched.read_s
            if len(fetched.ids) or not fetched.key.counted:
                window.append(MicroBatch(to_device(fetched.data, self.loading.device), fetched.ids))
            if fetched.key.closes and window:
                cursor = replace(fetched.key.cursor, start=self._start)
                yield StepBatch(tuple(window), cursor, tuple(bad), fetched.key.of_all, read_s)
                window = []
                bad = []
                read_s = 0.0
        if bad and self.loading.epochs is None:
            raise _none_left(bad)

    def _fetched(self, found: Set[int]) -> Iterator[Fetched | Failed | None]:
        """Yield micro-batches, and None after an epoch of a map-style dataset read in this process.

        ``found`` contains the unreadable samples so far. The caller adds to it, and these samples are not read again.
        """
        loading = self.loading
        if isinstance(self.dataset, IterableDataset):
            stream = FetchStream(self.dataset, start=self.cursor, settings=loading)
            if loading.workers == 0:
                return self._seeding_workers(_pinned(iter(stream), loading))
            return self._seeding_workers(read_in_workers(stream, None, replace(loading, workers=1)))
        source = Fetch(self.dataset, seed=loading.seed, collate=loading.collate, on_bad_sample=loading.on_bad_sample)
        epochs = self.epochs(found)
        if loading.workers == 0:
            return _pinned(_one_by_one(source, epochs), loading)
        if isinstance(self.dataset, OpenFiles):  # each further worker would also read the files completely
            loading = replace(loading, workers=1)
        keys = chain.from_iterable(
            epochs if loading.loader is None else _padded_epochs(epochs, loading.workers * loading.prefetch)
        )
        return _without(found, read_in_workers(source, keys, loading), source)

    def _seeding_workers(self, fetched: Iterator[Fetched | Failed]) -> Iterator[Fetched | Failed]:
        """Yield the batches of a stream.

        At the start of each epoch, draws the workers' seed, so that the generators advance as in a plain loop.
        """
        epoch = self.cursor.epoch if self.cursor.position else self.cursor.epoch - 1
        reached = 0
        for each in fetched:
            if isinstance(each, Fetched) and each.key.epoch > epoch:
                epoch = each.key.epoch
                if self.loading.loader is not None:
                    self.loading.loader.draw_seed(epoch)
                if reached and not self.loading.drop_last:  # else the last samples are not seen here
                    self._compare_length(type(self.dataset).__name__, length_of(self.dataset), reached, "samples")
            reached = each.key.cursor.position if isinstance(each, Fetched) else 0
            yield each

    def _compare_length(self, name: str, expected: int | None, seen: int, unit: str) -> None:
        """Report once that an epoch has another length than expected.

        With workers over a stream, each may end with a batch that is not full, so small differences are usual.
        """
        if self._has_wrong_length or expected is None or abs(expected - seen) <= MIN_LENGTH_ERROR * expected:
            return
        self._has_wrong_length = True
        self.say(
            f"epoch       {seen:,} {unit}, but len() of the {name} is {expected:,}, and lengths in epochs, the "
            "schedule and progress follow it: correct its __len__, or remove it to have an epoch counted before the run"
        )

    def keys(self, found: Collection[int] = ()) -> Iterator[Key]:
        """Yield the keys of all ``epochs``."""
        return chain.from_iterable(self.epochs(found))

    def epochs(self, found: Collection[int] = ()) -> Iterator[Iterator[Key]]:
        """Yield, for each epoch from the cursor on, the keys of its micro-batches; ends if no batch can be filled.

        Each epoch leaves out the quarantine and the contents of ``found`` at its start. The order of an epoch is drawn
        when its first key is requested.
        """
        last = self.loading.epochs
        for epoch in count(self.cursor.epoch) if last is None else range(self.cursor.epoch, last):
            yield self._epoch(epoch, found)
            if not self._has_steps:  # later epochs would have none either
                return

    def _epoch(self, epoch: int, found: Collection[int]) -> Iterator[Key]:
        loading, steps = self.loading, self._in_default_order
        begin = self.cursor.position if epoch == self.cursor.epoch else 0
        left_out = np.array([*loading.quarantine, *found])
        self._has_steps = begin > 0
        if loading.order is not None or self._draws_live(begin):
            steps = self._in_user_order
        for planned in islice(steps(epoch, begin, left_out), 0, None, loading.every):
            for key in self._cut(epoch, planned):
                self._has_steps = self._has_steps or len(key.ids) > 0 or steps == self._in_default_order
                yield key

    def _draws_live(self, begin: int) -> bool:
        """Return True if ``loading.loader`` draws the epoch's order. An epoch keeps the order in which it began."""
        return self.loading.loader is not None and (begin == 0 or self._start is not None)

    def _in_default_order(self, epoch: int, begin: int, left_out: Ids) -> Iterator[_Planned]:
        loading, size = self.loading, len(self.dataset)
        if not size or (loading.drop_last and size < loading.batch_size):
            return
        whole = size - size % loading.batch_size if loading.drop_last else size
        order, reached = self._order_of(epoch), size if loading.shuffle else whole
        if len(left_out) and np.isin(order[:reached], left_out).all():
            return
        # if the epoch began with another batch size, its last full batch ends elsewhere
        end = size - (size - begin) % loading.batch_size if loading.drop_last else size
        for start in range(begin, end, loading.batch_size):
            ids = order[start : min(start + loading.batch_size, end)]
            yield _Planned(start, ((ids, ~np.isin(ids, left_out) if len(left_out) else None),))

    def _order_of(self, epoch: int) -> Ids | FilesOrder:
        """Return the positions of an epoch in order, as an object that can be sliced."""
        seed, shuffle = self.loading.seed, self.loading.shuffle
        if isinstance(self.dataset, OpenFiles):
            return self.dataset.files.order(seed=seed, epoch=epoch, shuffle=shuffle)
        return epoch_order(len(self.dataset), seed=seed, epoch=epoch, shuffle=shuffle)

    def _in_user_order(self, epoch: int, begin: int, left_out: Ids) -> Iterator[_Planned]:
        loading = self.loading
        digest = hashlib.blake2b(digest_size=8)
        start = begin
        order, drawn = self._draw_order(epoch, begin)
        if begin:
            drawn = self._skip_consumed(drawn, begin, digest)
        batches = drawn if order.in_batches else regrouped(drawn, loading.batch_size)
        num_batches = 0
        while window := list(islice(batches, loading.joined if order.in_batches else 1)):
            if loading.drop_last and not order.in_batches and len(window[0]) < loading.batch_size:
                return
            for ids in window:
                digest.update(ids.tobytes())
            parts = tuple((ids, ~np.isin(ids, left_out) if len(left_out) else None) for ids in window)
            yield _Planned(start, parts, digest.hexdigest())
            start += sum(map(len, window))
            num_batches += len(window)
        if order.in_batches and not begin:
            self._compare_length(type(order.sampler).__name__, order.size, num_batches, "batches")
        elif not order.in_batches:
            self._compare_length(type(order.sampler).__name__, order.size, start, "samples")

    def _draw_order(self, epoch: int, begin: int) -> tuple[UserOrder, Iterator[Ids]]:
        """Return the order of an epoch and its positions, from the first one on."""
        loader, order = self.loading.loader, self.loading.order
        if loader is None or not self._draws_live(begin):
            assert order is not None
            return order, order.batches(self.loading.seed, epoch)
        if begin and self._start is not None:
            return loader, loader.again(epoch, self._start)
        self._start, drawn = loader.begin(epoch)
        return loader, drawn

    def _skip_consumed(self, drawn: Iterator[Ids], begin: int, digest: hashlib.blake2b) -> Iterator[Ids]:
        """Yield what follows the first ``begin`` positions, which are drawn but not read."""
        number, rest = 0, np.zeros(0, dtype=np.int64)
        while number < begin and (ids := next(drawn, None)) is not None:
            mine, rest = ids[: begin - number], ids[begin - number :]
            digest.update(mine.tobytes())
            number += len(mine)
        what = f"the first {number:,} positions of epoch {self.cursor.epoch} were drawn again"
        self.resumed = comparison_message(what, number, digest.hexdigest() == self.cursor.digest, self.cursor)
        if len(rest):
            yield rest
        yield from drawn

    def _cut(self, epoch: int, planned: _Planned) -> Iterator[Key]:
        """Yield the keys of a step, or of this rank's part of it."""
        loading = self.loading
        start = planned.start
        end = planned.end
        after = Cursor(epoch, end, planned.digest)
        if loading.ranks > 1 or loading.exact:
            of_all = np.concatenate([_used_ids(*part) for part in planned.parts])
            yield from keys_of_rank(Key(epoch, start, of_all, True, after), loading)
            return
        for ids, kept in planned.parts:
            for first in range(0, len(ids), loading.micro_size):
                some = slice(first, min(first + loading.micro_size, len(ids)))
                stop = start + some.stop - first
                mine = _used_ids(ids[some], None if kept is None else kept[some])
                yield Key(epoch, start, mine, stop == end, after if stop == end else Cursor(epoch, stop))
                start = stop


def _rows_of_this_rank(batch: MicroBatch, loading: Loading) -> MicroBatch:
    """Return the rows of this rank. Raises DataError for a ready-made batch that cannot be divided."""
    try:
        return rows_of_rank(batch, loading.rank, loading.ranks)
    except UsageError as error:
        raise DataError(
            f"{loading.ranks} ranks share the rows of a ready batch, and this has none to share: {error.message}",
            remedy="give batches whose tensors have a row for each sample, a Dataset of samples with a collate_fn, or "
            "train in one process",
        ) from error


class _Planned(NamedTuple):
    """The positions of a step, in parts that are read separately, each with a mask of the used ones (None: all)."""

    start: int
    parts: tuple[tuple[Ids, NDArray[np.bool_] | None], ...]
    digest: str = ""

    @property
    def end(self) -> int:
        return self.start + sum(len(ids) for ids, _ in self.parts)


def _used_ids(ids: Ids, kept: NDArray[np.bool_] | None) -> Ids:
    return ids if kept is None else ids[kept]


def _without(found: Set[int], batches: Iterator[Fetched | Failed], source: Fetch) -> Iterator[Fetched | Failed]:
    """Read micro-batches again without samples that were found bad meanwhile, as a resumed run would read them."""
    for fetched in batches:
        if found and isinstance(fetched, Fetched) and not found.isdisjoint(fetched.key.ids.tolist()):
            yield source[fetched.key.without(found)]
        else:
            yield fetched


def _none_left(bad: list[BadSample]) -> DataError:
    return DataError(
        f"no sample is left to train on: the last {len(bad)} could not be read, "
        f"sample {bad[0].id} because of {bad[0].what}",
        sample_ids=[each.id for each in bad],
        remedy="open one with dataset[i]: all are likely to have the same fault",
    )


def _read_ahead(steps: Iterator[StepBatch | None], at_once: int) -> Iterator[StepBatch]:
    """Yield the same steps, reading ``at_once`` of them together, but not beyond a None: the steps after it depend on
    training.

    An error of reading is raised when its step is reached.
    """
    if at_once == 1:
        yield from filter(None, steps)
        return
    error: Exception | None = None
    while error is None:
        several: list[StepBatch] = []
        is_over = True
        try:
            for batch in islice(steps, at_once):
                is_over = False
                if batch is None:
                    break
                several.append(_with_cached_properties(batch))
        except Exception as raised:
            error = raised
        yield from several
        if is_over and error is None:
            return
    raise error


def _with_cached_properties(batch: StepBatch) -> StepBatch:
    """Compute the cached properties now. This saves about 10 us per step."""
    batch.size, batch.tokens, batch.tensors  # noqa: B018
    return batch


def _one_by_one(source: Fetch, epochs: Iterator[Iterator[Key]]) -> Iterator[Fetched | Failed | None]:
    """Yield the micro-batch of each key, and None after the last one of an epoch."""
    for keys in epochs:
        for key in keys:
            yield source[key]
        yield None


def _padded_epochs(epochs: Iterator[Iterator[Key]], ahead: int) -> Iterator[Iterator[Key]]:
    """Yield the same epochs, each followed by as many empty keys as workers read ahead.

    A key is requested when the batch ``ahead`` positions before it has been used. So the order of an epoch is drawn
    after the last step of the previous epoch, as in a loop over the loader.
    """
    for keys in epochs:
        yield keys
        yield iter([EMPTY_KEY] * ahead)


EMPTY_KEY = Key(0, 0, np.zeros(0, dtype=np.int64), False, Cursor())
"""A key without samples, which closes no step."""
F = TypeVar("F", Fetched | Failed, Fetched | Failed | None)


def _pinned(batches: Iterator[F], loading: Loading) -> Iterator[F]:
    return map(_pin, batches) if loading.pin_memory else batches


def _pin(fetched: F) -> F:
    if not isinstance(fetched, Fetched):
        return fetched
    return fetched._replace(data=_map(lambda tensor: tensor.pin_memory(), fetched.data))


def to_device(data: Batch, device: torch.device) -> Batch:
    """Move every tensor of a nested batch, without waiting if the memory is pinned. Other leaves stay unchanged."""
    if device.type == "cpu":  # where it was created
        return data
    return _map(lambda tensor: tensor.to(device, non_blocking=True), data)


def _map(change: Callable[[Tensor], Tensor], data: Batch) -> Batch:
    if isinstance(data, Tensor):
        return change(data)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_map(change, value) for value in data))
    if isinstance(data, tuple | list):
        return type(data)(_map(change, value) for value in data)
    if isinstance(data, Mapping):
        return {key: _map(change, value) for key, value in data.items()}
    return data


class EvaluationBatches:
    """One pass in the order of the dataset, at most ``limit`` batches; may be iterated repeatedly.

    The quarantine of ``loading`` belongs to the training set and is ignored here. An unreadable sample is an error.
    """

    def __init__(self, dataset: AnyDataset, loading: Loading, *, limit: int | None = None) -> None:
        once = replace(
            loading,
            epochs=1,
            shuffle=False,
            drop_last=False,
            quarantine=frozenset(),
            on_bad_sample="stop",
            live=False,
            loader=None,
        )
        self.steps, self.limit = StepBatches(dataset, once), limit

    def __iter__(self) -> Iterator[MicroBatch]:
        for step in islice(self.steps, self.limit):
            yield from step.micro

    @property
    def count(self) -> int | None:
        """The number of batches, at most ``limit``; None without a limit for a stream of unknown length."""
        count = self._unlimited_count
        return count if self.limit is None or (count or math.inf) < self.limit else self.limit

    @property
    def _unlimited_count(self) -> int | None:
        dataset, order = self.steps.dataset, self.steps.loading.order
        if isinstance(dataset, ReadyBatches):
            return dataset.size
        size = length_of(dataset) if order is None else order.size
        is_in_batches = order is not None and order.in_batches
        return size if size is None or is_in_batches else math.ceil(size / self.steps.loading.batch_size)

    def part(self, count: int) -> EvaluationBatches:
        """Return at most ``count`` of these batches, always the same: evenly spaced, or the first ones of a stream."""
        is_stream = isinstance(self.steps.dataset, IterableDataset | ReadyBatches)
        every = 1 if is_stream else math.ceil((self.count or count) / count)
        return EvaluationBatches(self.steps.dataset, replace(self.steps.loading, every=every), limit=count)
