"""Unwraps any supported form of data into the dataset, the order of its samples, and the settings for reading it."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from trainwright.data.fetch import AnyDataset, Collate, Sample, WorkerInit
from trainwright.data.generators import HeldGenerators, prepare_epoch, seeded
from trainwright.data.mixture import Mixture
from trainwright.data.padding import TokenRows, is_token_samples
from trainwright.data.read_files import OpenFiles
from trainwright.data.ready_batches import PROGRESS_S, Pass, ReadyBatches, silent
from trainwright.data.sample_order import LoaderOrder, UserOrder
from trainwright.errors import Problem, RecipeError, UsageError, text_of
from trainwright.plan.batch import UserBatches
from trainwright.plan.make import RunFacts

MAX_COLUMNS = 4
"""Longer tuples and lists hold samples."""
TABLE_REMEDY = "name them: tw.table(frame, inputs=['a', 'b'], target='y')"


class Columns(Dataset[dict[str, Tensor]]):
    """A dataset of dicts with the rows of ``columns``, whose first dimensions are equal."""

    deterministic = True

    def __init__(self, columns: Mapping[str, Tensor]) -> None:
        self.columns = dict(columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}

    def fetch_batch(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        """Return the collated batch of these samples."""
        rows = torch.from_numpy(np.asarray(indices, dtype=np.int64))
        return {name: column.index_select(0, rows) for name, column in self.columns.items()}


@dataclass(frozen=True)
class Unwrapped:
    """A dataset, and the settings of the DataLoader that contained it; if there was none, they are None.

    ``order`` is the order of a custom sampler, and ``loader`` the order of a loop over the full DataLoader. If the data
    come in batches, ``dataset`` is a ReadyBatches, or ``order`` yields batches. ``not_used`` holds the settings of the
    loader that have no effect, with the reason.
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
    order: UserOrder | None = None
    loader: LoaderOrder | None = None
    not_used: Mapping[str, str] = field(default_factory=dict)

    @property
    def origin(self) -> object:
        """The object that identifies the data; for ready-made batches the dataset that they come from, if known."""
        return self.dataset.origin if isinstance(self.dataset, ReadyBatches) else self.dataset

    @property
    def own_batches(self) -> UserBatches | None:
        """Size and number of the batches that the data determine; None if Trainwright makes the batches."""
        if isinstance(self.dataset, ReadyBatches):
            return UserBatches(self.dataset.batch_size, self.dataset.size, ready=True)
        if self.order is not None and self.order.in_batches:
            return UserBatches(self.order.batch_size, self.order.size)
        return None

    @property
    def samples(self) -> int | None:
        """Number of samples in an epoch; None if unknown."""
        if self.order is None:
            return length_of(self.dataset)
        return None if self.order.in_batches else self.order.size


def unwrap(data: object) -> Unwrapped:
    """Return the dataset of ``data``, which has one of these forms:

    - a dataset with ``__getitem__`` and ``__len__``, or an IterableDataset of samples; a dataset of Hugging Face
      without a format gives tensors, as with ``with_format("torch")``;
    - a tuple of tensors of one length, or a dict of them, whose rows are samples;
    - a mixture of datasets, see ``mix``;
    - a torch DataLoader, whose sampler is kept;
    - anything else that can be iterated, or a function without arguments that makes such a thing: ready batches.

    NumPy arrays become tensors; float64 becomes torch's default dtype. Raises UsageError for anything else, and for an
    empty dataset.
    """
    if isinstance(data, DataLoader):
        unwrapped = _unwrap_loader(data)
    elif isinstance(data, Mixture):
        unwrapped = Unwrapped(data, order=UserOrder(data.order))
    else:
        dataset = _with_tensors(_dataset(data))
        order = getattr(dataset, "order", None)
        unwrapped = Unwrapped(
            dataset,
            order=UserOrder(order) if isinstance(order, Sampler) else None,
            collate=TokenRows() if is_token_samples(dataset) else default_collate,
        )
    _require_length(unwrapped)
    return unwrapped


def _dataset(data: object) -> AnyDataset:
    if isinstance(data, tuple | list) and data and all(isinstance(part, Tensor | np.ndarray) for part in data):
        return TensorDataset(*_of_one_length(data))
    if isinstance(data, Mapping) and data and all(isinstance(part, Tensor | np.ndarray) for part in data.values()):
        return Columns(dict(zip(data, _of_one_length([*data.values()]), strict=True)))
    if isinstance(data, tuple | list) and 1 < len(data) <= MAX_COLUMNS:
        _refuse_columns(data)
    if type(data) is np.ndarray and data.dtype == np.float64:
        return _from_numpy(data)
    if hasattr(data, "iloc"):
        raise UsageError(
            f"a {type(data).__name__} has columns of any kind, and which are inputs and which the target is not known",
            remedy=TABLE_REMEDY,
        )
    indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Mapping | str)
    if (indexed and not isinstance(data, type)) or (isinstance(data, IterableDataset) and not _is_pipeline(data)):
        return data
    if _gives_batches(data):
        return ReadyBatches(data)
    if isinstance(data, Mapping):
        other = next((f"; {name!r} is a {type(x).__name__}" for name, x in data.items() if not hasattr(x, "shape")), "")
        raise UsageError(
            f"a dict is a dataset if its values are tensors or arrays of one length{other}",
            remedy="convert them, torch.tensor(...), or give a list with one dict for each sample",
        )
    raise UsageError(
        f"a {type(data).__name__} is not a dataset: it lacks __getitem__ and __len__, and cannot be iterated",
        remedy="give a Dataset, a DataLoader, a tuple or dict of tensors of one length, or an iterable of batches",
    )


def _refuse_columns(parts: Sequence[object]) -> None:
    """Raise UsageError if ``parts`` are columns or datasets: as samples they would be of different types."""
    names = ", ".join(type(part).__name__ for part in parts)
    if any(isinstance(part, Dataset | DataLoader) for part in parts):
        raise UsageError(f"({names}) are several datasets", remedy="give the second as val=, or join them by tw.mix")
    if any(hasattr(part, "iloc") for part in parts):
        raise UsageError(f"({names}) are no tensors", remedy=TABLE_REMEDY)
    if not all(isinstance(part, Tensor | np.ndarray | list | tuple) and len(part) for part in parts):
        return
    if len({(type(part), type(part[0])) for part in parts}) > 1:  # type: ignore[index]
        raise UsageError(
            f"({names}) are columns, and not all of them are tensors",
            remedy="convert lists: (torch.tensor(x), torch.tensor(y))",
        )


def _is_pipeline(data: object) -> bool:
    """Return True for an IterableDataset that contains a DataLoader, like WebDataset's, and so yields batches."""
    stages = getattr(data, "pipeline", ())
    return isinstance(stages, Sequence) and any(isinstance(stage, DataLoader) for stage in stages)


def _with_tensors(dataset: AnyDataset) -> AnyDataset:
    """Set the format of a Hugging Face dataset to torch unless it has one. Otherwise lists would become columns."""
    if not hasattr(dataset, "with_format"):
        return dataset
    has_format = dataset.format["type"] if hasattr(dataset, "format") else getattr(dataset, "_formatting", None)
    return dataset if has_format else dataset.with_format("torch")


def _gives_batches(data: object) -> bool:
    if isinstance(data, Mapping | str | bytes | type | nn.Module):
        return False
    if isinstance(data, Iterable):
        return True
    if not callable(data):
        return False
    try:
        parameters = inspect.signature(data).parameters.values()
    except (TypeError, ValueError):
        return False
    needed = (each for each in parameters if each.default is each.empty)
    return all(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in needed)


def _of_one_length(columns: tuple[Any, ...] | list[Any]) -> list[Tensor]:
    tensors = [part if isinstance(part, Tensor) else _from_numpy(part) for part in columns]
    if any(tensor.layout is not torch.strided for tensor in tensors):
        raise UsageError("batches of sparse tensors cannot be collated", remedy="convert them: x.to_dense()")
    if len(lengths := {len(tensor) if tensor.dim() else 0 for tensor in tensors}) > 1:
        raise UsageError(
            f"the tensors have different lengths: {sorted(lengths)}",
            remedy="give one row per sample in each; samples of different shapes need a torch Dataset",
        )
    return tensors


def length_of(dataset: AnyDataset) -> int | None:
    """Return the number of samples; None for a stream without length, and for ready-made batches."""
    is_stream = isinstance(dataset, IterableDataset)
    if not hasattr(dataset, "__len__"):
        return None
    try:
        size: int = len(dataset)
    except Exception:
        if is_stream:  # it inherits a __len__ that only raises
            return None
        raise
    return None if is_stream and size == 0 else size


def _require_length(data: Unwrapped) -> None:
    try:
        sizes = (length_of(data.dataset), data.samples, data.own_batches.count if data.own_batches else None)
    except Exception as error:
        raise UsageError(
            f"len() of the dataset raised {text_of(error, lines=1)}",
            remedy="let its __len__ return the number of samples, or make it an IterableDataset",
        ) from None
    if 0 in sizes:
        raise UsageError("the dataset is empty", remedy="check its arguments and where it reads from")


def _from_numpy(array: np.ndarray) -> Tensor:
    """Convert an array to a tensor. float64, NumPy's default, becomes torch's default dtype."""
    try:
        tensor = torch.from_numpy(np.require(array, requirements=["C", "W"]))  # torch warns of read-only arrays
    except TypeError:
        raise UsageError(
            f"an array of {array.dtype} cannot be a tensor", remedy="give numbers: array.astype('float32'), or codes"
        ) from None
    return tensor.to(torch.get_default_dtype()) if tensor.dtype == torch.float64 else tensor


def _unwrap_loader(loader: DataLoader[Sample]) -> Unwrapped:
    if _must_run_unchanged(loader):
        return Unwrapped(ReadyBatches(loader))
    sampler = loader.sampler
    batch_size = loader.batch_size
    drop_last = loader.drop_last
    if type(loader.batch_sampler) is BatchSampler:  # also a BatchSampler that the user made
        inside = loader.batch_sampler
        sampler = inside.sampler
        batch_size = inside.batch_size
        drop_last = inside.drop_last
    order = None
    if batch_size is None:
        order = UserOrder(loader.batch_sampler, in_batches=True)  # type: ignore[arg-type]
    elif not (
        _shuffles_all(sampler) or type(sampler) is SequentialSampler or isinstance(loader.dataset, IterableDataset)
    ):
        order = UserOrder(sampler)
    if order is not None and not _gives_positions(order):
        return Unwrapped(ReadyBatches(loader))
    in_batches = order is not None and order.in_batches
    own = LoaderOrder(loader, loader.batch_sampler if in_batches else sampler, in_batches=in_batches)  # type: ignore[arg-type]
    if order is not None:
        own.repeats = order.repeats
    not_used = {}
    if not loader.in_order:
        not_used["in_order=False"] = "batches come in their order, so that the run can be resumed"
    context = loader.multiprocessing_context
    return Unwrapped(
        loader.dataset,
        batch_size,
        _shuffles_all(sampler),
        drop_last,
        loader.num_workers,
        default_collate if loader.collate_fn is None else loader.collate_fn,
        loader.prefetch_factor,
        loader.timeout or None,
        loader.worker_init_fn,
        context.get_start_method() if isinstance(context, BaseContext) else context,
        order,
        None if isinstance(loader.dataset, OpenFiles) else own,
        not_used,
    )


def _must_run_unchanged(loader: DataLoader[Sample]) -> bool:
    """Return True if only the loader itself can make its batches."""
    is_subclass = type(loader).__iter__ is not DataLoader.__iter__
    several = isinstance(loader.dataset, IterableDataset) and loader.num_workers > 1
    return is_subclass or several or (loader.batch_size is None and loader.batch_sampler is None)


def _gives_positions(order: UserOrder) -> bool:
    try:
        order.try_twice()
    except TypeError:
        return False
    except Exception as error:
        raise UsageError(
            f"the sampler raised {text_of(error, lines=1)}", remedy="iterate over it by hand: list(loader.sampler)"
        ) from error
    return True


def _shuffles_all(sampler: object) -> bool:
    """Return True if a sampler visits every sample once, in random order."""
    if not isinstance(sampler, RandomSampler) or type(sampler) is not RandomSampler or sampler.replacement:
        return False
    return sampler.num_samples == len(sampler.data_source)


MAX_COUNTING_S = 120.0
"""Maximum time for counting an epoch, in seconds: some streams never end."""


def with_epoch_counted(facts: RunFacts, data: Unwrapped, path: str, seed: int, say: Callable[[str], None]) -> RunFacts:
    """Return ``facts`` with the length of an epoch, if the data have none.

    ``path`` is the path of the recipe's field that is in epochs; "" if there is none.

    Raises:
        RecipeError: The data can be iterated only once, or do not end in time.
    """
    own = facts.own_batches
    is_known = facts.train_samples is not None or (own is not None and own.count is not None)
    if is_known or not path:
        return facts
    if isinstance(data.dataset, ReadyBatches) and data.dataset.once:
        raise _unknown(path, "one whose data can be iterated once cannot be counted before it")
    begin_s = reported_s = time.monotonic()
    counted = 0
    for counted, _ in enumerate(_epoch(data, seed), start=1):
        now_s = time.monotonic()
        if now_s - begin_s > MAX_COUNTING_S:
            raise _unknown(path, f"after {counted:,} {_unit(data)} in {MAX_COUNTING_S:g} s there was no end of one")
        if now_s - reported_s > PROGRESS_S:
            reported_s = now_s
            say(f"counting an epoch: {counted:,} {_unit(data)} so far")
    took = f"{counted:,} {_unit(data)}, counted in {time.monotonic() - begin_s:.2g} s"
    say(f"epoch       {took}: {path} is in epochs, and the data have no length")
    return (
        replace(facts, train_samples=counted)
        if own is None
        else replace(facts, own_batches=replace(own, count=counted))
    )


def _epoch(data: Unwrapped, seed: int) -> Iterator[object]:
    """Yield the batches, or the samples, of the first epoch. Random generators are restored."""
    if isinstance(data.dataset, ReadyBatches):
        with HeldGenerators([data.dataset.source]).preserved():
            one = Pass(data.dataset, seed, 0, silent)
            while (batch := one.next()) is not None:
                yield batch
        return
    if data.order is not None:  # its positions are drawn, but no sample is read
        with HeldGenerators([data.order.sampler]).preserved():
            for ids in data.order.batches(seed, 0):
                yield from [ids] if data.order.in_batches else ids
        return
    with seeded(seed):
        prepare_epoch(data.dataset, seed, 0)
        yield from data.dataset


def _unit(data: Unwrapped) -> str:
    return "samples" if data.own_batches is None else "batches"


def _unknown(path: str, why: str) -> RecipeError:
    remedy = "give it in steps, samples, tokens or seconds, or data that can be iterated again: a list, a loader, "
    remedy += "a function without arguments that makes the iterator"
    return RecipeError(Problem(path, f"is in epochs, and {why}", remedy=remedy))
