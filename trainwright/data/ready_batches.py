"""Ready-made batches: an iterable runs unchanged, with its own workers; one pass over it is an epoch."""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from functools import lru_cache
from itertools import chain, count
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_convert

from trainwright.checkpoint.codec import INTEGERS, Tree, encode
from trainwright.checkpoint.cursor import Cursor, EpochStart, MicroBatch, StreamState, count_rows
from trainwright.checkpoint.rng import RngBag, seed_of
from trainwright.data.fetch import Batch, Loading
from trainwright.data.generators import HeldGenerators, UserGenerators, prepare_epoch, set_epoch
from trainwright.data.workers import preserved_sigchld
from trainwright.errors import DataError, text_of

Say: TypeAlias = Callable[[str], None]
PROGRESS_S = 10.0
"""Seconds between progress messages of a replay."""
_END_OF_DATA = object()
ALL_OF_FIRST, DIGESTED = 16, 16
"""The digest of an epoch covers the first ALL_OF_FIRST batches, which show a changed order at once, and then every
DIGESTED-th batch."""
SPARSE = f"/{DIGESTED}"
"""Suffix of the digest of an epoch that does not cover all batches."""
BATCHES_PER_IDS = 32
"""Number of batches whose ids are created together, which is ten times as fast as one call per step."""
PLAIN_TYPES = {int, float, str, bool, type(None)}
"""Types of immutable values that a checkpoint can store."""
_KEY_TYPES = {str}
MAY_REPEAT_WARNING = "some samples of this epoch may come twice, and some not at all"
REPEATABLE_REMEDY = "give a list, a loader, or a function without arguments that makes the iterator"


class ReadyBatches:
    """An iterable of batches, or a function without arguments that creates one for each pass; ``kind`` names it."""

    def __init__(self, source: object, kind: str = "") -> None:
        self.source = source
        self.kind = kind or str(getattr(source, "__name__", type(source).__name__))

    @property
    def makes(self) -> bool:
        """True if the source is a function that creates an iterable for each pass."""
        return callable(self.source) and not isinstance(self.source, Iterable)

    @property
    def once(self) -> bool:
        """True if it is an iterator that cannot start again."""
        source = self.source
        return isinstance(source, Iterable) and iter_is_itself(source) and not hasattr(source, "reset")

    @property
    def size(self) -> int | None:
        """Number of batches in an epoch; None if unknown."""
        if self.makes or not hasattr(self.source, "__len__"):
            return None
        with suppress(Exception):  # some __len__ only raise, with various errors
            return len(self.source)
        return None

    @property
    def batch_size(self) -> int | None:
        """Number of samples in a batch, if the source has a ``batch_size``."""
        named = getattr(self.source, "batch_size", None)
        return named if isinstance(named, int) and named > 0 else None

    @property
    def keeps_state(self) -> bool:
        """True if the source can report and load its state."""
        return _state_access_of(self.source) is not None

    @property
    def are_in_memory(self) -> bool:
        """True if the batches are in a list and torch draws their order, so nothing depends on training."""
        loader = self.source
        if type(loader) is not DataLoader or loader.num_workers or loader.collate_fn is not default_convert:
            return False
        dataset: object = loader.dataset
        return type(dataset) in (list, tuple) and type(loader.sampler) in (SequentialSampler, RandomSampler)

    @property
    def origin(self) -> object:
        """The object that the batches are made from."""
        return self.source.dataset if isinstance(self.source, DataLoader) else self.source

    def first_row(self) -> object:
        """Return one sample of the first batch. The batch is put back if the source can be iterated only once.

        Raises DataError if there is none, or if rows cannot be counted.
        """
        with HeldGenerators([self.source]).preserved():
            batch = Pass(self, 0, 0, silent).next()
        if batch is None:
            raise DataError("the training data gave no batch", remedy="check that it is not empty or used up")
        if self.once:
            self.source = chain([batch.data], self.source)  # type: ignore[arg-type]
        if count_rows(batch.data) is None:
            raise DataError(
                f"one sample cannot be taken out of a batch of a {self.kind}, whose tensors have no rows in common",
                remedy="leave out what needs a sample: a plan, and batch.micro, offload or parallel: auto",
            )
        return _row(batch.data)

    def begin(self, seed: int | None, epoch: int) -> Any:
        """Return the iterable of an epoch. The generators that it holds are seeded, unless ``seed`` is None."""
        made = self.source() if self.makes else self.source  # type: ignore[operator]
        if seed is None:
            set_epoch(made, epoch)
        else:
            prepare_epoch(made, seed, epoch)
        if iter_is_itself(made) and callable(reset := getattr(made, "reset", None)) and epoch:
            reset()
        return made


def iter_is_itself(source: object) -> bool:
    """Return True if ``source`` can be read once only."""
    return isinstance(source, Iterator)


class Pass:
    """One epoch of the user's iterator, and its progress.

    The ids of a batch are positions in the pass, one per row, or one per batch if rows cannot be counted.
    ``generators`` are reused from the previous pass.

    ``live``: draws up to the first batch use the random generators of the process, as in a loop over the same iterator,
    and later draws use a copy of them. ``start`` is the random state at the start of the pass in an earlier process,
    if its batches are read again.
    """

    def __init__(
        self,
        source: ReadyBatches,
        seed: int,
        epoch: int,
        say: Say,
        state: StreamState | None = None,
        *,
        covers_all: bool = False,
        generators: UserGenerators | None = None,
        live: bool = False,
        start: EpochStart | None = None,
    ) -> None:
        self._say = say
        self.epoch = epoch
        self.position = 0
        self.digest = ""
        self.number = 0
        self._generators = generators or UserGenerators(0)
        self.start, held = start, HeldGenerators([source.source])
        if start is not None:
            self._generators.restore(start.rng)
            held.restore(start.held)
        elif live:
            self.start = EpochStart(RngBag.capture(), held.read())
        else:
            self._generators.seed(seed_of(f"{seed}:{epoch}:batches"))
        self._is_live = live and start is None
        try:
            with nullcontext() if self._is_live else self._generators, preserved_sigchld():
                made = source.begin(None if self.start else seed, epoch)
                keeper = _state_access_of(made)
                if state is not None and keeper is not None:
                    keeper.load(copy.deepcopy(state.own))
                self._iterator = iter(made)
                self._keeper = keeper or _state_access_of(self._iterator)
                if state is not None and keeper is None and self._keeper is not None:
                    self._keeper.load(copy.deepcopy(state.own))
        except Exception as error:
            raise self._failed(error) from error
        if state is not None:
            self._generators.restore(state.rng())
        self._around_next = nullcontext() if _draws_in_workers(made) else self._generators
        self._covers_all = covers_all
        self._ids_begin = self._ids_end = 0

    def next(self) -> MicroBatch | None:
        """Return the next batch on the host, None at the end. Raises DataError for any error of the iterator."""
        try:
            if self._is_live:
                data, self._is_live = next(self._iterator, _END_OF_DATA), False
                self._generators.continue_here()
            else:
                with self._around_next:
                    data = next(self._iterator, _END_OF_DATA)
        except Exception as error:
            raise self._failed(error) from error
        if data is _END_OF_DATA:
            return None
        data = _as_tensors(data)
        rows = count_rows(data) or 1
        begin = self.position
        self.number = self.number + 1
        self.position = self.position + rows
        if self.position > self._ids_end:
            self._ids_begin, self._ids_end = begin, begin + rows * BATCHES_PER_IDS
            self._ids = np.arange(begin, self._ids_end)
        ids = self._ids[begin - self._ids_begin : self.position - self._ids_begin]
        if self._covers_all or self.number <= ALL_OF_FIRST:
            self.digest = digest_with(self.digest, data)
        elif self.number % DIGESTED == 0:
            self.digest = digest_with(self.digest, data) + SPARSE
        elif self.number == ALL_OF_FIRST + 1:
            self.digest += SPARSE
        return MicroBatch(data, ids)

    def _failed(self, error: Exception) -> DataError:
        return DataError(
            f"the data raised {text_of(error, lines=1)} after {self.number} batches of epoch {self.epoch}",
            remedy="iterate over the data by hand; nothing comes from an iterator that raised",
        )

    @property
    def is_stateful(self) -> bool:
        """True if the iterator can report its state."""
        return self._keeper is not None

    def cursor(self) -> Cursor:
        """Return the position in the epoch after the last batch."""
        return Cursor(self.epoch, self.position, self.digest, self._state(), self.start)

    def _state(self) -> StreamState | None:
        """Return the state of the iterator; None if a checkpoint cannot store it, which is reported once."""
        if self._keeper is None:
            return None
        try:
            own = _copied(self._keeper.read())
        except Exception as error:  # an error of the user's code, or a TypeError that names the obstacle
            self._keeper = None
            self._say(
                f"the state of the loader is not kept, a resume reads its batches again: {text_of(error, lines=1)}"
            )
            return None
        return StreamState(own, self._generators.read(), self.number)


def _copied(own: Tree) -> Tree:
    """Copy a state. Raises TypeError for values that a checkpoint cannot store."""
    if type(own) is dict and PLAIN_TYPES.issuperset(map(type, own.values())) and _KEY_TYPES.issuperset(map(type, own)):
        return own.copy()
    own = copy.deepcopy(own)
    encode(own)
    return own


def silent(line: str) -> None:
    """Ignore a message."""


class _StateAccess(NamedTuple):
    read: Callable[[], Tree]
    load: Callable[[Tree], object]


def _state_access_of(thing: object) -> _StateAccess | None:
    for names in (("state_dict", "load_state_dict"), ("get_state", "set_state")):
        read, load = (getattr(thing, name, None) for name in names)
        if callable(read) and callable(load):
            return _StateAccess(read, load)
    return None


def _draws_in_workers(source: object) -> bool:
    """Return True if nothing is drawn in this process after the loader has started."""
    is_plain = type(source) is DataLoader and isinstance(source.dataset, IterableDataset)
    return is_plain and source.num_workers > 0  # type: ignore[attr-defined]


class ReadyStream:
    """Ready-made batches, epoch after epoch, from a cursor on, until an epoch is empty or the source cannot start
    again.

    A resume within an epoch loads the state of the iterator, if it has one that a checkpoint can store; else the
    batches before the cursor are read again and dropped. ``resumed`` describes the outcome. Ranks compare every step,
    so with several ranks the digest covers every batch, else some of them.
    """

    def __init__(self, source: ReadyBatches, start: Cursor, loading: Loading, say: Say) -> None:
        self.source = source
        self.start = start
        self.loading = loading
        self.say = say
        self._generators = UserGenerators(loading.seed)
        self.resumed = ""
        self.number = 0  # batches in the last epoch that ended
        self._messages: set[str] = set()

    def steps(self) -> Iterator[tuple[list[MicroBatch], Cursor] | None]:
        """Yield the batches of each step, ``joined`` of them or the rest of an epoch, and None after each epoch."""
        first, end = self.start.epoch, self.loading.epochs
        for epoch in count(first) if end is None else range(first, end):
            one = self._started_pass(epoch)
            is_empty = one.position == 0
            while window := [batch for _ in range(self.loading.joined) if (batch := one.next()) is not None]:
                is_empty = False
                yield window, one.cursor()
            if self.source.once and end is None:
                self.say(
                    f"the data can be iterated once, and gave {one.number:,} batches; to go on, {REPEATABLE_REMEDY}"
                )
            if self.source.once or is_empty:
                return
            self.number = one.number
            yield None

    def _started_pass(self, epoch: int) -> Pass:
        start = self.start
        if epoch != start.epoch or not start.position:
            return self._pass(epoch)
        if start.stream is not None:
            one = self._pass(epoch, start.stream)
            if one.is_stateful:
                one.number = start.stream.number
                one.position = start.position
                one.digest = start.digest
                self.resumed = "the loader goes on from its own state, as exactly as that says where it was"
                return one
        one = self._pass(epoch)
        self._replay(one)
        return one

    def _pass(self, epoch: int, state: StreamState | None = None) -> Pass:
        start = self.start
        is_resumed = epoch == start.epoch and start.position > 0
        covers_all = self.loading.ranks > 1 or (is_resumed and not start.digest.endswith(SPARSE))
        return Pass(
            self.source,
            self.loading.seed,
            epoch,
            self._say_once,
            state,
            covers_all=covers_all,
            generators=self._generators,
            live=self.loading.live and not is_resumed,
            start=start.start if is_resumed else None,
        )

    def _say_once(self, line: str) -> None:
        if line not in self._messages:
            self._messages.add(line)
            self.say(line)

    def _replay(self, one: Pass) -> None:
        start, reported_s = self.start, time.monotonic()
        while one.position < start.position and one.next() is not None:
            if time.monotonic() - reported_s > PROGRESS_S:
                reported_s = time.monotonic()
                self.say(f"reading the data again: {one.position:,} of {start.position:,} samples")
        what = f"the first {one.number:,} batches of epoch {start.epoch} were read again and not trained on"
        self.resumed = comparison_message(what, one.position, one.digest == start.digest, start)


def comparison_message(what: str, reached: int, is_same: bool, start: Cursor) -> str:
    """Return a message on whether the first ``reached`` samples of an epoch, read again, are the same as before."""
    if is_same:
        return f"{what}, and they are the same as before"
    short = "" if reached == start.position else f" there were only {reached:,}, and"
    return f"{what}, and they are NOT the same as before:{short} {MAY_REPEAT_WARNING}"


def _row(data: Batch) -> Batch:
    if isinstance(data, Tensor):
        return data[0] if data.dim() else data
    if isinstance(data, tuple | list):
        return tuple(_row(each) for each in data)
    return {key: _row(value) for key, value in data.items()} if isinstance(data, Mapping) else data


def _as_tensors(data: Batch) -> Batch:
    """Return the batch with NumPy arrays of numbers converted to tensors."""
    if isinstance(data, Tensor):
        return data
    if isinstance(data, np.ndarray) and data.dtype.kind in "biufc":
        return torch.from_numpy(np.require(data, requirements=["C", "W"]))
    if type(data) is tuple or type(data) is list:  # a list is copied, because its owner may change it
        if type(data) is tuple and False not in [isinstance(each, Tensor) for each in data]:
            return data
        return type(data)([each if isinstance(each, Tensor) else _as_tensors(each) for each in data])
    return {key: _as_tensors(value) for key, value in data.items()} if type(data) is dict else data


_NUMPY_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)
"""Dtypes that NumPy also has; tensors of others are compared by their bytes."""
MAX_VALUES_COMPARED = 512
"""Maximum number of values per tensor in a digest, spread evenly: some microseconds per tensor of any size."""


def digest_with(before: str, data: Batch) -> str:
    """Return the digest of the previous batches and this one."""
    parts = [before.encode()]
    _add(parts, data, 0)
    return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()


def _add(parts: list[bytes], data: object, depth: int) -> None:
    """Add the compared parts of a batch.

    A tensor on a GPU adds only its shape, because its values would cost a sync.
    """
    if isinstance(data, Tensor):
        parts.append(_kind_of(data.dtype, data.shape))
        if data.is_cpu and data.layout == torch.strided and data.numel():
            parts.append(_some_values(data))
    elif isinstance(data, tuple | list):
        parts.append(str(len(data)).encode())
        for each in data[:MAX_VALUES_COMPARED]:
            _add(parts, each, depth)
    elif isinstance(data, Mapping):
        for key, value in data.items():
            parts.append(repr(key).encode())
            _add(parts, value, depth)
    elif isinstance(data, str | bytes | bool | int | float | None):
        parts.append(repr(data).encode())
    elif depth < 4 and hasattr(data, "__dict__"):  # a batch of graphs, or any class of the user's
        _add(parts, vars(data), depth + 1)


@lru_cache(maxsize=256)
def _kind_of(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"{dtype}{tuple(shape)}".encode()


def _some_values(tensor: Tensor) -> bytes:
    """Return the bytes of some values. The others are not copied, whatever the memory layout."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    if plain.dtype not in _NUMPY_DTYPES:
        plain = plain.view(INTEGERS[plain.element_size()])
    flat = plain.numpy().ravel(order="K")
    return flat[:: -(-len(flat) // MAX_VALUES_COMPARED)].tobytes()
