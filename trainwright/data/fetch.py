"""Reads a batch: a pure function of (dataset, key), with the same bits in any worker process.

If a batch cannot be collated, finds the samples at fault.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from multiprocessing.sharedctypes import RawArray
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset, TensorDataset, default_collate, get_worker_info

from trainwright.checkpoint.cursor import BadSample, Cursor, Ids
from trainwright.checkpoint.rng import preserved_rng, reseed, seed_of
from trainwright.data.generators import EpochGenerators, seeded
from trainwright.data.padding import differ_in_length
from trainwright.data.sample_order import LoaderOrder, UserOrder
from trainwright.errors import DataError, text_of

Sample: TypeAlias = Any
"""Result of a dataset for one index, of any type."""
Batch: TypeAlias = Any
"""Result of a collate function: a tensor, or nested containers of tensors."""
Collate = Callable[[list[Sample]], Batch]
WorkerInit = Callable[[int], object]


def samples_at_fault(samples: Sequence[Sample], collate: Collate) -> dict[int, str]:
    """Return a description of each sample that prevents collation, by index.

    These are the samples that cannot be collated even alone; if there are none, the samples whose types and shapes
    differ from the majority. Empty if there is no majority, or if the other samples cannot be collated either.
    """
    alone = [at for at, sample in enumerate(samples) if not _collates([sample], collate)]
    found = {at: f"it is {_form(samples[at])}" for at in alone} or _of_another_form(samples)
    rest = [sample for at, sample in enumerate(samples) if at not in found]
    if not rest:  # each fails alone, so the collate function is at fault, unless there was nothing to collate
        return {at: why for at, why in found.items() if samples[at] is None}
    return found if _collates(rest, collate) else {}


def _collates(samples: list[Sample], collate: Collate) -> bool:
    try:
        collate(samples)
    except Exception:
        return False
    return True


def _of_another_form(samples: Sequence[Sample]) -> dict[int, str]:
    forms = [_form(sample) for sample in samples]
    (usual, number), *others = Counter(forms).most_common()
    if not others or 2 * number <= len(forms):
        return {}
    return {at: f"it is {form}, the others are {usual}" for at, form in enumerate(forms) if form != usual}


def _form(value: object) -> str:
    """Return types and shapes of a sample, as text."""
    if isinstance(value, Tensor | np.ndarray):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_form(each)}" for key, each in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(_form(each) for each in value) + ")"
    return "None" if value is None else type(value).__name__


class InProgress:
    """The samples that each worker is reading, in shared memory. Only workers write, at about 0.3 us per sample."""

    def __init__(self, workers: int) -> None:
        self._pid = _shared(workers)
        self._first = _shared(workers)
        self._count = _shared(workers)

    def start(self) -> None:
        """Register this process as a worker."""
        if info := get_worker_info():
            self._pid[info.id] = os.getpid()

    def begin(self, first: int, count: int = 1) -> None:
        """Record that ``count`` samples from ``first`` on are being read together; 0: none."""
        if self._first and (info := get_worker_info()):
            self._first[info.id], self._count[info.id] = first, count

    def of(self, pid: int | None) -> tuple[int, int]:
        """Return the first sample and the number of samples that a process is reading; the number is 0 if it reads
        none.
        """
        pids = list(self._pid)
        worker = pids.index(pid) if pid in pids else None
        return (-1, 0) if worker is None else (self._first[worker], self._count[worker])


def _shared(size: int) -> MutableSequence[int]:
    numbers: MutableSequence[int] = RawArray("q", size) if size else []
    return numbers


class Piece(NamedTuple):
    """The samples of one micro-batch of a rank, and their offset in the step.

    A rank without samples gets the first sample of the step, with ``counted`` False: weight 0.
    """

    ids: Ids
    offset: int
    counted: bool = True


def pieces(ids: Ids, rank: int, ranks: int, micro_size: int) -> Iterator[Piece]:
    """Divide the samples of a step, shape (n,), evenly, and cut the part of ``rank`` into micro-batches.

    All ranks get the same number of micro-batches, because ranks may wait for each other in each micro-batch. ``ids``
    is not empty.
    """
    count = -(-len(ids) // (ranks * micro_size))
    shares = np.array_split(ids, ranks)
    offset = sum(map(len, shares[:rank]))
    for part in np.array_split(shares[rank], count):
        yield Piece(part, offset) if len(part) else Piece(ids[:1], 0, counted=False)
        offset += len(part)


def slices(ids: Ids, rank: int, ranks: int, micro_size: int) -> Iterator[Piece]:
    """Cut a step into micro-batches that are the same on any number of ranks; yield the micro-batches of ``rank``."""
    starts = range(0, len(ids), micro_size)
    mine = np.array_split(np.array(starts), ranks)[rank].tolist()
    for start in mine:
        yield Piece(ids[start : start + micro_size], start)
    if not mine:
        yield Piece(ids[:1], 0, counted=False)


OnBadSample = Literal["stop", "quarantine"]
AnyDataset: TypeAlias = Any
"""A map-style or iterable dataset, identified by its methods; it need not be a ``torch.utils.data.Dataset``."""


class Key(NamedTuple):
    """Identifies one micro-batch.

    Attributes:
        epoch: Epoch of its samples.
        start: Position of its first sample in the epoch.
        ids: Dataset positions (n,) without quarantined samples; may be empty.
        closes: True if it is the last micro-batch of an optimizer step.
        cursor: Position in the data after it.
        counted: False if its samples are read with weight 0.
        of_all: Dataset positions of the samples of all ranks, if ranks share a step.
    """

    epoch: int
    start: int
    ids: Ids
    closes: bool
    cursor: Cursor
    counted: bool = True
    of_all: Ids | None = None

    def without(self, left_out: Container[int]) -> Key:
        """Return the key of the same micro-batch without these samples."""
        return self._replace(ids=np.array([i for i in self.ids.tolist() if i not in left_out], dtype=np.int64))


class Fetched(NamedTuple):
    """A micro-batch on the host: the samples of ``key`` without the ``bad``; ``data`` is None if none is left.

    ``read_s`` is the time that the reading process took, in seconds.
    """

    key: Key
    data: Batch
    bad: tuple[BadSample, ...] = ()
    read_s: float = 0.0

    @property
    def ids(self) -> Ids:
        """Dataset positions of the samples in ``data`` that count."""
        if not self.key.counted:
            return self.key.ids[:0]
        return self.key.without({bad.id for bad in self.bad}).ids if self.bad else self.key.ids


LEAVE_OUT_REMEDY = "open it with dataset[i] and repair it, or leave it out with data.quarantine: [i]"


class Failed(NamedTuple):
    """The error of a dataset as text, because not every exception can be sent to another process."""

    ids: tuple[int, ...]
    what: str
    remedy: str = LEAVE_OUT_REMEDY

    def error(self) -> DataError:
        """Return the error to raise in the training process."""
        which = f"sample {self.ids[0]}" if len(self.ids) == 1 else f"one of the samples {list(self.ids)}"
        return DataError(f"the dataset raised {self.what} for {which}", sample_ids=self.ids, remedy=self.remedy)


PAD_REMEDY = (
    "the samples differ in length: a collate function has to pad them, DataLoader(dataset, ..., collate_fn=tw.pad())"
)
CONVERSATION_KEYS = frozenset({"messages", "conversations"})
CHAT_REMEDY = (
    "the model needs token ids: write the conversations to a file, and read it with use: chat in a recipe or "
    "trainwright.finetune.datasets.Chat(path, tokenizer=...)"
)


FORM_REMEDY = (
    "no sample can be collated: let the dataset give tensors, arrays or numbers (pictures: a transform such as "
    "ToTensor()), or the DataLoader get a collate_fn that takes its samples"
)


def batch_seed(seed: int, epoch: int, start: int) -> int:
    """Return a seed that depends only on the data read, not on the worker."""
    return seed_of(f"{seed}:{epoch}:{start}")


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Return the seed of one sample, independent of its micro-batch."""
    return seed_of(f"{seed}:{epoch}:sample {index}")


class Fetch(torch.utils.data.Dataset["Fetched | Failed"]):
    """A map-style dataset whose index is a Key.

    The generators are seeded from (seed, epoch, index) before each sample is read, so a sample is the same in any
    micro-batch. Draws for several samples at once, by a collate function or in ``__getitems__``, use a seed of the
    micro-batch. A dataset with ``deterministic = True`` (or a TensorDataset) is not seeded; if it has
    ``fetch_batch(ids)`` and there is no collate function, full batches are read with it.

    If ``on_bad_sample`` is "quarantine", a sample that cannot be read or collated is left out. The other samples are
    the same as if the bad sample had been in quarantine before.
    """

    def __init__(
        self,
        dataset: AnyDataset,
        *,
        seed: int,
        collate: Collate = default_collate,
        on_bad_sample: OnBadSample = "stop",
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self.collate = collate
        self.on_bad_sample = on_bad_sample
        self.in_progress = InProgress(0)
        inner = _inside_subsets(dataset)
        self.samples_draw = not (isinstance(inner, TensorDataset) or getattr(inner, "deterministic", False))
        own_collate = collate is not default_collate
        self.makes_batches = hasattr(dataset, "fetch_batch") and not self.samples_draw and not own_collate
        self.sliced = is_sliced(dataset, collate)
        self.in_batches = self.sliced or self.makes_batches or hasattr(inner, "__getitems__")
        self.batches_draw = own_collate or (self.samples_draw and self.in_batches)

    def __getitem__(self, key: Key) -> Fetched | Failed:
        begin_s = time.perf_counter()
        if hasattr(self.dataset, "set_epoch"):  # for every batch, because an evaluation may share the dataset
            self.dataset.set_epoch(key.epoch)
        if self.samples_draw or self.batches_draw:
            with preserved_rng():
                fetched = self._fetched(key)
        else:
            fetched = self._fetched(key)
        self.in_progress.begin(-1, 0)
        return _timed(fetched, begin_s)

    def _fetched(self, key: Key) -> Fetched | Failed:
        full_key, bad = key, tuple[BadSample, ...]()
        while len(key.ids):
            found = self._in_one_go(key) if self.in_batches else self._one_by_one(key)
            if isinstance(found, Fetched):
                return Fetched(full_key, found.data, bad)
            if isinstance(found, Failed):
                return found
            if self.on_bad_sample == "stop":
                return Failed((found[0].id,), found[0].what)
            bad = (*bad, *found)
            key = key.without({each.id for each in found})
        return Fetched(full_key, None, bad)

    def _in_one_go(self, key: Key) -> Fetched | Failed | list[BadSample]:
        self.in_progress.begin(int(key.ids[0]), len(key.ids))
        self._seed_batch(key)
        try:
            return Fetched(key, self._batch(key))
        except (Exception, SystemExit) as error:
            alone = self._one_by_one(key)  # finds the sample at fault
            return Failed(tuple(key.ids.tolist()), text_of(error, lines=1)) if isinstance(alone, Fetched) else alone

    def _batch(self, key: Key) -> Batch:
        if self.makes_batches:
            return self.dataset.fetch_batch(key.ids)
        if self.sliced:
            index = torch.from_numpy(key.ids)
            return tuple(tensor.index_select(0, index) for tensor in self.dataset.tensors)
        return self.collate(self.dataset.__getitems__(key.ids.tolist()))

    def _one_by_one(self, key: Key) -> Fetched | Failed | list[BadSample]:
        samples, bad = [], []
        for index in key.ids.tolist():
            self.in_progress.begin(index)
            if self.samples_draw:
                reseed(sample_seed(self.seed, key.epoch, index))
            try:
                samples.append(self.dataset[index])
            except (Exception, SystemExit) as error:
                bad.append(BadSample(index, text_of(error, lines=1)))
                if self.on_bad_sample == "stop":
                    break
        if bad:
            return bad
        self.in_progress.begin(int(key.ids[0]), len(key.ids))

        def collate(some: list[Sample]) -> Batch:
            self._seed_batch(key)
            return self.collate(some)

        return _collated(key, samples, collate)

    def _seed_batch(self, key: Key) -> None:
        if self.batches_draw:
            reseed(batch_seed(self.seed, key.epoch, key.start))


def _timed(fetched: Fetched | Failed, begin_s: float) -> Fetched | Failed:
    return fetched._replace(read_s=time.perf_counter() - begin_s) if isinstance(fetched, Fetched) else fetched


def is_sliced(dataset: AnyDataset, collate: Collate) -> bool:
    """Return True if a batch is a plain slice of tensors in memory."""
    return isinstance(dataset, TensorDataset) and collate is default_collate


def _inside_subsets(dataset: AnyDataset) -> AnyDataset:
    """Return the dataset inside of Subsets, which have ``__getitems__`` even if the dataset reads sample by sample."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


def _collated(key: Key, samples: list[Sample], collate: Collate) -> Fetched | Failed | list[BadSample]:
    try:
        return Fetched(key, collate(samples))
    except Exception as error:
        what, ids = f"{text_of(error, lines=1)} while collating", key.ids.tolist()
        if isinstance(samples[0], Mapping) and not CONVERSATION_KEYS.isdisjoint(samples[0]):
            return Failed(tuple(ids), f"{what} conversations", CHAT_REMEDY)
        alone = samples_at_fault(samples, collate).items()
        if alone:
            return [BadSample(ids[at], f"{what} ({why})") for at, why in alone]
        if differ_in_length(samples):
            return Failed(tuple(ids), what, PAD_REMEDY)
        return Failed(tuple(ids), what) if _collates(samples[:1], collate) else Failed(tuple(ids), what, FORM_REMEDY)


@dataclass(frozen=True)
class Loading:
    """Settings for reading samples and making batches of them.

    Attributes:
        batch_size: Samples per optimizer step.
        micro_size: Samples per micro-batch.
        seed: Seed of order and samples.
        shuffle: Shuffle the samples of each epoch.
        drop_last: Drop a last batch that is not full.
        workers: Number of worker processes.
        prefetch: Number of micro-batches that each worker reads ahead.
        timeout_s: Maximum time that the trainer waits for a worker; None: forever.
        worker_init: ``worker_init(number)`` is called in each worker when it starts.
        start_method: Start method of multiprocessing; None: Python's default.
        pin_memory: Pin the memory of batches.
        device: Device of the batches.
        collate: Makes a batch of samples.
        epochs: Number of epochs; None: endless.
        quarantine: Dataset positions that are never trained on.
        on_bad_sample: "quarantine" adds an unreadable sample to the quarantine, "stop" ends the run.
        every: Read each ``every``-th batch of an epoch.
        order: Order of a sampler of the user.
        live: At the start of an epoch, the user's loader draws from the random generators of the process, as in a plain
            loop. If False, it draws from generators that are seeded by (seed, epoch).
        loader: With ``live``, the order of a DataLoader.
        joined: Number of batches that form one step, if ``order`` yields batches or the batches are ready-made.
        rank: Index of the part of each step that this rank reads. Ready-made batches are divided by rows.
        ranks: Number of parts of a step.
        exact: A step has the same micro-batches on any number of ranks.
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
    order: UserOrder | None = None
    live: bool = False
    loader: LoaderOrder | None = None
    joined: int = 1
    rank: int = 0
    ranks: int = 1
    exact: bool = False


def keys_of_rank(step: Key, settings: Loading) -> Iterator[Key]:
    """Yield the keys of a rank's micro-batches of the step ``step``; none for an empty step."""
    if not len(step.ids):
        return
    cut = slices if settings.exact else pieces
    parts = list(cut(step.ids, settings.rank, settings.ranks, settings.micro_size))
    for number, part in enumerate(parts, start=1):
        start, closes = step.start + part.offset, number == len(parts)
        yield Key(step.epoch, start, part.ids, closes, step.cursor, part.counted, step.ids if closes else None)


class FetchStream(IterableDataset["Fetched | Failed"]):
    """Micro-batches of an iterable dataset, epoch after epoch, until an epoch has no sample.

    ids are positions in the stream. Each epoch draws from its own generators, seeded once. To start within an epoch,
    the samples before the start are read again, so that a shuffle buffer inside the dataset fills in the same way.
    Samples in quarantine are read and dropped. Every rank reads the full stream and uses its part. A sample that raises
    ends the stream regardless of ``on_bad_sample``, because a generator that has raised yields no further items.
    """

    def __init__(self, dataset: AnyDataset, *, start: Cursor, settings: Loading) -> None:
        self.dataset = dataset
        self.start = start
        self.settings = settings
        self.in_progress = InProgress(0)

    def __iter__(self) -> Iterator[Fetched | Failed]:
        first, end = self.start.epoch, self.settings.epochs
        epochs = count(first) if end is None else range(first, end)
        for epoch in epochs:
            skip = self.start.position if epoch == self.start.epoch else 0
            any_sample, begin_s = skip > 0, time.perf_counter()
            for fetched in self._epoch(epoch, skip):
                any_sample = any_sample or isinstance(fetched, Failed) or len(fetched.ids) > 0
                yield _timed(fetched, begin_s)
                begin_s = time.perf_counter()
            if not any_sample:
                return

    def _epoch(self, epoch: int, skip: int) -> Iterator[Fetched | Failed]:
        settings = self.settings
        position = 0
        own = EpochGenerators(batch_seed(self.settings.seed, epoch, -1))
        with own.in_use():
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)
            items = iter(self.dataset)
        while True:
            size = settings.batch_size if position >= skip else min(settings.batch_size, skip - position)
            with own.in_use():
                samples, failed = self._take(items, size, position)
            self.in_progress.begin(-1, 0)
            short = len(samples) < size
            if failed:
                yield failed
            elif position >= skip and not (short and settings.drop_last):
                yield from self._micro_batches(epoch, position, samples)
            if short:
                return
            position += size

    def _take(self, items: Iterator[Sample], size: int, position: int) -> tuple[list[Sample], Failed | None]:
        """Read up to ``size`` samples; fewer at the end of the stream and after an error."""
        samples: list[Sample] = []
        try:
            self.in_progress.begin(position)
            for sample in islice(items, size):
                samples.append(sample)
                self.in_progress.begin(position + len(samples))
        except (Exception, SystemExit) as error:
            remedy = (
                "catch it in the dataset and go on with the next sample: nothing comes from an iterator that raised"
            )
            return samples, Failed((position + len(samples),), text_of(error, lines=1), remedy)
        return samples, None

    def _micro_batches(self, epoch: int, position: int, samples: list[Sample]) -> Iterator[Fetched | Failed]:
        settings = self.settings
        for key in self._keys(epoch, position, len(samples)):
            part = [samples[i - position] for i in key.ids.tolist()]
            self.in_progress.begin(key.start, len(part))
            with seeded(batch_seed(settings.seed, epoch, key.start)):
                found = _collated(key, part, settings.collate) if part else Fetched(key, None)
            self.in_progress.begin(-1, 0)
            yield Failed((found[0].id,), found[0].what) if isinstance(found, list) else found

    def _keys(self, epoch: int, position: int, count: int) -> Iterator[Key]:
        """Yield the keys of a step of ``count`` samples from ``position`` on."""
        settings, end = self.settings, Cursor(epoch, position + count)
        if settings.ranks > 1 or settings.exact:
            full_key = Key(epoch, position, np.arange(position, position + count), True, end)
            yield from keys_of_rank(full_key.without(settings.quarantine), settings)
            return
        for first in range(0, count, settings.micro_size):
            start, stop = position + first, position + min(first + settings.micro_size, count)
            one = Key(epoch, start, np.arange(start, stop), stop == end.position, Cursor(epoch, stop))
            yield one.without(settings.quarantine)
