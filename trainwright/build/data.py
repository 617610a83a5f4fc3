"""The stream of step batches: order a pure function of (seed, epoch, position), sample ids always known."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from trainwright.build.fetch import Failed, Fetch, Fetched, FetchStream, Key, OnBadSample
from trainwright.data.order import epoch_order
from trainwright.errors import DataError, UsageError
from trainwright.state.cursor import BadSample, Cursor, MicroBatch, StepBatch


@dataclass(frozen=True)
class Loading:
    """How batches are made. ``batch_size`` samples an optimizer step, in micro-batches of ``micro_size``.

    ``prefetch`` is the number of micro-batches that each worker keeps ready. ``epochs`` None means for ever.
    ``quarantine`` are dataset positions that are never trained on; ``on_bad_sample`` says whether a sample that
    cannot be read joins them or ends the run.
    """

    batch_size: int
    micro_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    workers: int = 0
    prefetch: int = 2
    pin_memory: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    collate: Callable[[list[Any]], Any] = default_collate
    epochs: int | None = None
    quarantine: frozenset[int] = frozenset()
    on_bad_sample: OnBadSample = "stop"


class StepBatches:
    """An endless iterable of StepBatch over a dataset; a finite one over a stream that ends.

    Iterating starts at ``cursor`` and visits every sample exactly once an epoch. The last step of an epoch is
    short unless ``drop_last``. A sample in quarantine leaves its place in its micro-batch empty, so that no other is
    lost, repeated or moved. A micro-batch or step that comes out empty is passed over; where all do, the stream ends.

    Raises DataError for a sample that cannot be read, or when all of them have come into quarantine so.
    """

    def __init__(self, dataset: Any, loading: Loading, *, cursor: Cursor | None = None) -> None:
        self.dataset, self.loading, self.cursor = dataset, loading, cursor or Cursor()

    def __iter__(self) -> Iterator[StepBatch]:
        window: list[MicroBatch] = []
        bad: list[BadSample] = []  # of this step, and of those before it that came out empty
        found: set[int] = set()
        for fetched in self._fetched(found):
            if isinstance(fetched, Failed):
                raise fetched.error()
            bad += fetched.bad
            found.update(each.id for each in fetched.bad)
            if len(fetched.ids):
                window.append(MicroBatch(to_device(fetched.data, self.loading.device), fetched.ids))
            if fetched.key.closes and window:
                yield StepBatch(tuple(window), fetched.key.cursor, tuple(bad))
                window, bad = [], []
        if bad and self.loading.epochs is None:
            raise _none_left(bad)

    def _fetched(self, found: Set[int]) -> Iterator[Fetched | Failed]:
        """``found`` grows while iterating: samples that could not be read, which are not asked for again."""
        how = self.loading
        source: Any
        if isinstance(self.dataset, IterableDataset):
            source = FetchStream(self.dataset, start=self.cursor, how=how)
            if how.workers == 0:
                return _pinned(iter(source), how)
            # one worker: each further one would read the whole stream too, and most datasets would shard it
            return _from_workers(source, None, replace(how, workers=1))
        source = Fetch(self.dataset, seed=how.seed, collate=how.collate, on_bad_sample=how.on_bad_sample)
        keys = self.keys(found)
        if how.workers == 0:
            return _pinned((source[key] for key in keys), how)
        return _without(found, _from_workers(source, keys, how), source)

    def keys(self, found: Collection[int] = ()) -> Iterator[Key]:
        """The micro-batches to come, for ever, from the cursor on; none when no batch can be filled.

        From each epoch's start on it leaves out what ``found`` holds then, besides the quarantine.
        """
        how, size = self.loading, len(self.dataset)
        if not size or (how.drop_last and size < how.batch_size):
            return
        for epoch in count(self.cursor.epoch) if how.epochs is None else range(self.cursor.epoch, how.epochs):
            order = epoch_order(size, seed=how.seed, epoch=epoch, shuffle=how.shuffle)
            kept = ~np.isin(order, [*how.quarantine, *found])
            whole = size - size % how.batch_size if how.drop_last else size
            if not kept[: size if how.shuffle else whole].any():  # nor will there be any in a later epoch
                return
            begin = self.cursor.position if epoch == self.cursor.epoch else 0
            # an epoch that was begun in batches of another size has its last whole one elsewhere
            end = size - (size - begin) % how.batch_size if how.drop_last else size
            for step_start in range(begin, end, how.batch_size):
                step_end = min(step_start + how.batch_size, end)
                for start in range(step_start, step_end, how.micro_size):
                    stop = min(start + how.micro_size, step_end)
                    ids = order[start:stop][kept[start:stop]]
                    yield Key(epoch, start, ids, stop == step_end, Cursor(epoch, stop))


def _without(found: Set[int], batches: Iterator[Fetched | Failed], source: Fetch) -> Iterator[Fetched | Failed]:
    """What workers had fetched before a sample in it was found bad is fetched again, as a resumed run would."""
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
        remedy="open one with dataset[i]: the fault is likely to be one of all",
    )


def _pinned(batches: Iterator[Fetched | Failed], how: Loading) -> Iterator[Fetched | Failed]:
    if not how.pin_memory:
        yield from batches
        return
    for fetched in batches:
        if isinstance(fetched, Fetched):
            fetched = fetched._replace(data=_map(lambda tensor: tensor.pin_memory(), fetched.data))
        yield fetched


def _from_workers(source: Any, keys: Iterator[Key] | None, how: Loading) -> Iterator[Any]:
    """torch's DataLoader for its worker processes alone; its own generator leaves ours untouched.

    Raises DataError when a worker is killed.
    """
    with warnings.catch_warnings():  # more workers than cores is the user's choice
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        loader = DataLoader(
            source,
            batch_size=None,
            sampler=_Once(keys) if keys is not None else None,
            num_workers=how.workers,
            prefetch_factor=how.prefetch,
            pin_memory=how.pin_memory,
            collate_fn=_as_is,
            worker_init_fn=partial(_out_of_reach, os.getpid()),
            generator=torch.Generator().manual_seed(how.seed),
        )
        fetched = iter(loader)
    try:
        yield from fetched
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise DataError(
            "a process that loads data was killed: " + str(error).splitlines()[0],
            remedy="most often memory ran out (see dmesg): take fewer data.workers or a smaller data.prefetch",
        ) from error


def _out_of_reach(trainer: int, worker: int) -> None:
    """A process group of its own: Ctrl-C goes to the whole foreground group, but the run decides when to stop.

    A worker whose trainer was killed before torch's watchdog began would live for ever. (Under a fork server it has
    another parent anyway.)
    """
    if os.getppid() != trainer and multiprocessing.get_start_method() != "forkserver":
        os._exit(1)
    if hasattr(os, "setpgrp"):
        os.setpgrp()


class _Once:
    """A sampler that hands out an endless iterator."""

    def __init__(self, keys: Iterator[Key]) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[Key]:
        return self.keys


def _as_is(batch: Any) -> Any:
    return batch


def to_device(data: Any, device: torch.device) -> Any:
    """Moves every tensor of a nested batch; from pinned memory without waiting. Other leaves stay as they are."""
    return _map(lambda tensor: tensor.to(device, non_blocking=True), data)


def _map(change: Callable[[Tensor], Tensor], data: Any) -> Any:
    if isinstance(data, Tensor):
        return change(data)
    if isinstance(data, Mapping):
        return {key: _map(change, value) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_map(change, value) for value in data))
    if isinstance(data, tuple | list):
        return type(data)(_map(change, value) for value in data)
    return data


class EvaluationBatches:
    """One pass in the dataset's own order, at most ``limit`` batches of it; iterable again and again.

    A quarantine of ``loading`` is of the training set and does not count here; a sample that cannot be read stops.
    """

    def __init__(self, dataset: Any, loading: Loading, *, limit: int | None = None) -> None:
        here: dict[str, Any] = {"quarantine": frozenset(), "on_bad_sample": "stop"}
        once = replace(loading, epochs=1, shuffle=False, drop_last=False, **here)
        self.steps, self.limit = StepBatches(dataset, once), limit

    def __iter__(self) -> Iterator[MicroBatch]:
        for step in islice(self.steps, self.limit):
            yield from step.micro


@dataclass(frozen=True)
class Unwrapped:
    """What a torch DataLoader says about its data, None where it says nothing."""

    dataset: Any
    batch_size: int | None = None
    shuffle: bool | None = None
    drop_last: bool | None = None
    workers: int | None = None
    collate: Callable[[list[Any]], Any] = default_collate


def unwrap(data: Any) -> Unwrapped:
    """Accepts a dataset, a tuple of tensors of one length, or a torch DataLoader, which is taken apart.

    NumPy arrays in the tuple become tensors of their own type that share their memory.

    Raises UsageError for anything else, and for a DataLoader with a sampler of its own, whose order we could
    not promise to resume.
    """
    if isinstance(data, DataLoader):
        return _unwrap_loader(data)
    if isinstance(data, tuple | list) and data and all(isinstance(part, Tensor | np.ndarray) for part in data):
        data = [part if isinstance(part, Tensor) else _from_numpy(part) for part in data]
        if len(lengths := {len(part) if part.dim() else 0 for part in data}) > 1:
            raise UsageError(
                f"the tensors have different lengths: {sorted(lengths)}",
                remedy="give one row per sample in each; samples of different shapes need a torch Dataset",
            )
        return Unwrapped(torch.utils.data.TensorDataset(*data))
    indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Mapping | str)
    if indexed or isinstance(data, IterableDataset):
        return Unwrapped(data)
    raise UsageError(
        f"a {type(data).__name__} is no dataset: it lacks __getitem__ and __len__ and is no IterableDataset",
        remedy="give a torch Dataset, a DataLoader, or a tuple of tensors of one length",
    )


def _from_numpy(array: np.ndarray) -> Tensor:
    try:
        return torch.from_numpy(np.require(array, requirements=["C", "W"]))  # torch warns of what is read-only
    except TypeError:
        raise UsageError(
            f"an array of {array.dtype} cannot be a tensor", remedy="give numbers: array.astype('float32'), or codes"
        ) from None


def _unwrap_loader(loader: DataLoader[Any]) -> Unwrapped:
    sampler: Any = loader.sampler
    shuffle = type(sampler) is RandomSampler and not sampler.replacement
    shuffle = shuffle and sampler.num_samples == len(sampler.data_source)
    known = shuffle or type(sampler) is SequentialSampler or isinstance(loader.dataset, IterableDataset)
    if loader.batch_size is None or not known:
        raise UsageError(
            "this DataLoader has a sampler or batch sampler of its own, whose order cannot be resumed",
            remedy="give the dataset itself; Trainwright shuffles it by (seed, epoch)",
        )
    collate = default_collate if loader.collate_fn is None else loader.collate_fn
    return Unwrapped(loader.dataset, loader.batch_size, shuffle, loader.drop_last, loader.num_workers, collate)
