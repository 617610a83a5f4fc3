"""The stream of step batches: its order is a pure function of (seed, epoch, position), and sample ids are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from itertools import count, islice
from multiprocessing.context import BaseContext

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from trainwright.build.collation import Batch, Collate, Sample
from trainwright.build.fetch import AnyDataset, Failed, Fetch, Fetched, FetchStream, Key, OnBadSample, shared
from trainwright.build.workers import WorkerInit, Workers, read_in_workers
from trainwright.data.order import epoch_order
from trainwright.errors import DataError, UsageError, text_of
from trainwright.state.cursor import BadSample, Cursor, MicroBatch, StepBatch


@dataclass(frozen=True)
class Loading:
    """How batches are made: ``batch_size`` samples per optimizer step, in micro-batches of ``micro_size``.

    ``prefetch``, ``timeout_s``, ``worker_init`` and ``start_method`` are about the ``workers``, see there. ``epochs``
    None: no end.
    ``quarantine`` holds dataset positions that are never trained on; ``on_bad_sample`` says whether a sample that
    cannot be read is added to them or ends the run. Of the batches of an epoch, each ``every``-th one is read.
    ``rank`` is which of ``ranks`` shares of every step is read; where that is ``exact``, a step has the same
    micro-batches on any number of ranks.
    """

    batch_size: int
    micro_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    workers: int = 0
    prefetch: int = 2
    timeout_s: float | None = None
    worker_init: WorkerInit | None = None
    start_method: str | None = None
    pin_memory: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    collate: Collate = default_collate
    epochs: int | None = None
    quarantine: frozenset[int] = frozenset()
    on_bad_sample: OnBadSample = "stop"
    every: int = 1
    rank: int = 0
    ranks: int = 1
    exact: bool = False


AT_ONCE, AT_ONCE_BYTES = 8, 2**20
"""Micro-batches that are read at once from tensors in memory: so many, and so many bytes together."""


class StepBatches:
    """An endless iterable of StepBatch over a dataset; finite over an iterable dataset that ends.

    Iteration starts at ``cursor`` and visits every sample exactly once per epoch. The last step of an epoch is short
    unless ``drop_last``. A sample in quarantine is left out of its micro-batch and no other sample moves. An empty
    micro-batch or step is skipped; where all are empty, the stream ends.

    Raises DataError for a sample that cannot be read, or when every sample is in quarantine for that.
    """

    def __init__(self, dataset: AnyDataset, loading: Loading, *, cursor: Cursor | None = None) -> None:
        self.dataset, self.loading, self.cursor = dataset, loading, cursor or Cursor()

    def __iter__(self) -> Iterator[StepBatch]:
        window: list[MicroBatch] = []
        bad: list[BadSample] = []  # of this step and of empty steps before it
        found: set[int] = set()
        for fetched in self._fetched(found):
            if isinstance(fetched, Failed):
                raise fetched.error()
            bad += fetched.bad
            found.update(each.id for each in fetched.bad)
            if len(fetched.ids) or not fetched.key.counted:
                window.append(MicroBatch(to_device(fetched.data, self.loading.device), fetched.ids))
            if fetched.key.closes and window:
                yield StepBatch(tuple(window), fetched.key.cursor, tuple(bad), fetched.key.of_all)
                window, bad = [], []
        if bad and self.loading.epochs is None:
            raise _none_left(bad)

    def _fetched(self, found: Set[int]) -> Iterator[Fetched | Failed]:
        """``found`` holds the samples that could not be read; it grows while iterating, and they are not read again."""
        loading = self.loading
        if isinstance(self.dataset, IterableDataset):
            stream = FetchStream(self.dataset, start=self.cursor, settings=loading)
            if loading.workers == 0:
                return _pinned(iter(stream), loading)
            # one worker: each further one would read the whole stream too, and most datasets would shard it
            return read_in_workers(stream, None, _workers(replace(loading, workers=1)))
        source = Fetch(self.dataset, seed=loading.seed, collate=loading.collate, on_bad_sample=loading.on_bad_sample)
        keys = self.keys(found)
        if loading.workers == 0:
            fetched = (source[key] for key in keys)
            return _pinned(_ahead(fetched, source, loading) if source.sliced else fetched, loading)
        return _without(found, read_in_workers(source, keys, _workers(loading)), source)

    def keys(self, found: Collection[int] = ()) -> Iterator[Key]:
        """Yields the keys of the micro-batches from the cursor on; none when no batch can be filled.

        Each epoch leaves out the quarantine and what ``found`` holds when the epoch starts.
        """
        loading, size = self.loading, len(self.dataset)
        if not size or (loading.drop_last and size < loading.batch_size):
            return
        for epoch in count(self.cursor.epoch) if loading.epochs is None else range(self.cursor.epoch, loading.epochs):
            order = epoch_order(size, seed=loading.seed, epoch=epoch, shuffle=loading.shuffle)
            left_out = [*loading.quarantine, *found]
            kept = ~np.isin(order, left_out)
            whole = size - size % loading.batch_size if loading.drop_last else size
            if not kept[: size if loading.shuffle else whole].any():  # nor is there one in a later epoch
                return
            begin = self.cursor.position if epoch == self.cursor.epoch else 0
            # an epoch that began with another batch size has its last whole batch elsewhere
            end = size - (size - begin) % loading.batch_size if loading.drop_last else size
            for step_start in range(begin, end, loading.batch_size * loading.every):
                step_end = min(step_start + loading.batch_size, end)
                if loading.ranks > 1 or loading.exact:
                    of_all = order[step_start:step_end][kept[step_start:step_end]]
                    yield from shared(Key(epoch, step_start, of_all, True, Cursor(epoch, step_end)), loading)
                    continue
                for start in range(step_start, step_end, loading.micro_size):
                    stop = min(start + loading.micro_size, step_end)
                    ids = order[start:stop]
                    ids = ids[kept[start:stop]] if left_out else ids
                    yield Key(epoch, start, ids, stop == step_end, Cursor(epoch, stop))


def _workers(loading: Loading) -> Workers:
    return Workers(
        loading.workers,
        loading.prefetch,
        loading.timeout_s,
        loading.worker_init,
        loading.start_method,
        loading.pin_memory,
    )


def _without(found: Set[int], batches: Iterator[Fetched | Failed], source: Fetch) -> Iterator[Fetched | Failed]:
    """Reads again what workers had read before a sample of it was found bad, as a resumed run would read it."""
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


def _ahead(batches: Iterator[Fetched | Failed], source: Fetch, loading: Loading) -> Iterator[Fetched | Failed]:
    """Reads several micro-batches at once where they are small: one at a time costs twice as much, its code is cold."""
    sample_bytes = sum(tensor[:1].nbytes for tensor in source.dataset.tensors)
    at_once = max(1, min(AT_ONCE, AT_ONCE_BYTES // max(1, sample_bytes * loading.micro_size)))
    while several := list(islice(batches, at_once)):
        yield from several


def _pinned(batches: Iterator[Fetched | Failed], loading: Loading) -> Iterator[Fetched | Failed]:
    return map(_pin, batches) if loading.pin_memory else batches


def _pin(fetched: Fetched | Failed) -> Fetched | Failed:
    if isinstance(fetched, Failed):
        return fetched
    return fetched._replace(data=_map(lambda tensor: tensor.pin_memory(), fetched.data))


def to_device(data: Batch, device: torch.device) -> Batch:
    """Moves every tensor of a nested batch, without waiting where the memory is pinned. Other leaves stay unchanged."""
    if device.type == "cpu":  # where it was made
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
    """One pass in the order of the dataset, at most ``limit`` batches; may be iterated more than once.

    The quarantine of ``loading`` is of the training set and ignored here. A sample that cannot be read is an error.
    """

    def __init__(self, dataset: AnyDataset, loading: Loading, *, limit: int | None = None) -> None:
        once = replace(loading, epochs=1, shuffle=False, drop_last=False, quarantine=frozenset(), on_bad_sample="stop")
        self.steps, self.limit = StepBatches(dataset, once), limit

    def __iter__(self) -> Iterator[MicroBatch]:
        for step in islice(self.steps, self.limit):
            yield from step.micro

    @property
    def count(self) -> int | None:
        """The number of batches; None for a stream that does not say."""
        size = length_of(self.steps.dataset)
        count = None if size is None else math.ceil(size / self.steps.loading.batch_size)
        return count if self.limit is None or (count or math.inf) < self.limit else self.limit

    def part(self, count: int) -> EvaluationBatches:
        """At most ``count`` of these batches, always the same: evenly spaced, or the first ones of a stream."""
        every = 1 if isinstance(self.steps.dataset, IterableDataset) else math.ceil((self.count or count) / count)
        return EvaluationBatches(self.steps.dataset, replace(self.steps.loading, every=every), limit=count)


@dataclass(frozen=True)
class Unwrapped:
    """A dataset, and the settings of the DataLoader that it came in; None where there was none.

    ``not_used`` says which settings of it have no effect, and why.
    """

    dataset: AnyDataset
    batch_size: int | None = None
    shuffle: bool | None = None
    drop_last: bool | None = None
    workers: int | None = None
    collate: Collate = default_collate
    prefetch: int | None = None
    timeout_s: float | None = None
    worker_init: WorkerInit | None = None
    start_method: str | None = None
    not_used: Mapping[str, str] = field(default_factory=dict)


def unwrap(data: object) -> Unwrapped:
    """Returns the dataset of ``data``: a dataset, a tuple of tensors of one length, or a torch DataLoader.

    NumPy arrays in the tuple become tensors of their own dtype that share their memory.

    Raises UsageError for anything else, for an empty one, and for a DataLoader with a sampler of its own, whose order
    cannot be resumed.
    """
    unwrapped = _unwrap_loader(data) if isinstance(data, DataLoader) else Unwrapped(_dataset(data))
    _require_length(unwrapped.dataset)
    return unwrapped


def _dataset(data: object) -> AnyDataset:
    if isinstance(data, tuple | list) and data and all(isinstance(part, Tensor | np.ndarray) for part in data):
        tensors = [part if isinstance(part, Tensor) else _from_numpy(part) for part in data]
        if len(lengths := {len(tensor) if tensor.dim() else 0 for tensor in tensors}) > 1:
            raise UsageError(
                f"the tensors have different lengths: {sorted(lengths)}",
                remedy="give one row per sample in each; samples of different shapes need a torch Dataset",
            )
        return torch.utils.data.TensorDataset(*tensors)
    indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Mapping | str)
    if indexed or isinstance(data, IterableDataset):
        return data
    raise UsageError(
        f"a {type(data).__name__} is no dataset: it lacks __getitem__ and __len__ and is no IterableDataset",
        remedy="give a torch Dataset, a DataLoader, or a tuple of tensors of one length",
    )


def length_of(dataset: AnyDataset) -> int | None:
    """The number of samples; None for a stream that does not say."""
    is_stream = isinstance(dataset, IterableDataset)
    if not hasattr(dataset, "__len__"):
        return None
    try:
        size: int = len(dataset)
    except Exception:
        if is_stream:  # it inherits one that only raises
            return None
        raise
    return None if is_stream and size == 0 else size


def _require_length(dataset: AnyDataset) -> None:
    try:
        size = length_of(dataset)
    except Exception as error:
        raise UsageError(
            f"len() of the dataset raised {text_of(error, lines=1)}",
            remedy="let its __len__ return the number of samples, or make it an IterableDataset",
        ) from None
    if size == 0:
        raise UsageError("the dataset is empty", remedy="check its arguments and where it reads from")


def _from_numpy(array: np.ndarray) -> Tensor:
    try:
        return torch.from_numpy(np.require(array, requirements=["C", "W"]))  # torch warns of what is read-only
    except TypeError:
        raise UsageError(
            f"an array of {array.dtype} cannot be a tensor", remedy="give numbers: array.astype('float32'), or codes"
        ) from None


def _unwrap_loader(loader: DataLoader[Sample]) -> Unwrapped:
    sampler = loader.sampler
    shuffle = _shuffles_all(sampler)
    known = shuffle or type(sampler) is SequentialSampler or isinstance(loader.dataset, IterableDataset)
    if loader.batch_size is None or not known:
        raise UsageError(
            "this DataLoader has a sampler or batch sampler of its own, whose order cannot be resumed",
            remedy="give the dataset itself; Trainwright shuffles it by (seed, epoch)",
        )
    context = loader.multiprocessing_context
    return Unwrapped(
        loader.dataset,
        loader.batch_size,
        shuffle,
        loader.drop_last,
        loader.num_workers,
        default_collate if loader.collate_fn is None else loader.collate_fn,
        loader.prefetch_factor,
        loader.timeout or None,
        loader.worker_init_fn,
        context.get_start_method() if isinstance(context, BaseContext) else context,
        dict(_not_used(loader)),
    )


def _not_used(loader: DataLoader[Sample]) -> Iterator[tuple[str, str]]:
    if loader.generator is not None:
        yield "generator", "order and augmentation follow from the seed of the run, so that it can be resumed"
    if not loader.in_order:
        yield "in_order=False", "batches come in their order, so that the run can be resumed"


def _shuffles_all(sampler: object) -> bool:
    """Returns whether a sampler visits every sample once, in a random order."""
    if not isinstance(sampler, RandomSampler) or type(sampler) is not RandomSampler or sampler.replacement:
        return False
    return sampler.num_samples == len(sampler.data_source)
