"""Reads samples of a dataset without changing it: from a copy, or in workers like those of its loader."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, get_worker_info

from trainwright.checkpoint.rng import preserved_rng
from trainwright.doctor.facts.data import WorkerDraws
from trainwright.recorder.hooks import muted
from trainwright.recorder.plain_tensors import num_bytes as bytes_of
from trainwright.recorder.plain_tensors import plain
from trainwright.recorder.program import tensors_of
from trainwright.recorder.user_types import Loader

COPY_BYTES, COPY_OBJECTS = 64 * 2**20, 20_000
"""Maximum size of a dataset that is copied: bytes of its arrays and number of its objects."""
PEEK_S, TIMEOUT_S = 0.25, 20.0  # maximum for reading samples; for a batch of a worker
_Generators = np.random.Generator | np.random.RandomState | random.Random | torch.Generator


def length_of(value: object) -> int | None:
    """Returns the length; None if there is none, as for a loader of an iterable dataset."""
    try:
        return len(value) if isinstance(value, Sized) else None
    except TypeError:
        return None


def base_of(dataset: object) -> tuple[object, Sequence[int] | None]:
    """Returns the dataset under all Subsets, and the positions in it that they keep; None for all positions."""
    positions: Sequence[int] | None = None
    while isinstance(dataset, Subset):
        own = dataset.indices
        positions = own if positions is None else [own[i] for i in positions]
        dataset = dataset.dataset
    return dataset, positions


def peek(dataset: Dataset[object], positions: Sequence[int]) -> list[list[Tensor]]:
    """Returns the tensors of samples that a copy of the dataset yields within PEEK_S.

    [] for a dataset that is too large or cannot be copied.
    """
    if not _is_small(dataset):
        return []
    with muted(), preserved_rng():
        try:
            copied = copy.deepcopy(dataset)
            end_s, samples = time.perf_counter() + PEEK_S, []
            for position in positions:
                samples.append(leaves_of(copied[position]))
                if time.perf_counter() > end_s:
                    break
            return samples
        except Exception:  # a dataset of the user that cannot be copied is not read
            return []


def leaves_of(sample: object) -> list[Tensor]:
    """Returns the tensors of a sample. A plain number counts as one, because collation makes a tensor of it."""
    if isinstance(sample, bool | int | float | np.generic | np.ndarray):
        return [torch.as_tensor(sample)]
    if isinstance(sample, Mapping):
        return [leaf for value in sample.values() for leaf in leaves_of(value)]
    if isinstance(sample, list | tuple):
        return [leaf for value in sample for leaf in leaves_of(value)]
    return tensors_of(sample)


def _is_small(dataset: object) -> bool:
    num_bytes = 0
    for num_objects, leaf in enumerate(_walk(dataset)):
        num_bytes += bytes_of(leaf) if isinstance(leaf, Tensor) else leaf.nbytes if isinstance(leaf, np.ndarray) else 0
        if num_bytes > COPY_BYTES or num_objects > COPY_OBJECTS:
            return False
    return True


def _walk(value: object, depth: int = 6) -> Iterator[object]:
    """Yields an object and all objects in its attributes and containers, down to a depth."""
    yield value
    if depth == 0 or isinstance(value, Tensor | np.ndarray | str | bytes | int | float | type):
        return
    if isinstance(value, Mapping):
        items: Iterable[object] = value.values()
    elif isinstance(value, list | tuple | set):
        items = value
    else:
        items = getattr(value, "__dict__", {}).values()
    for item in items:
        yield from _walk(item, depth - 1)


def draws(loader: Loader, position: int) -> WorkerDraws | None:
    """Measures whether workers of ``loader`` draw equal random numbers.

    In each of two epochs, two workers read the sample at ``position`` twice. Returns None if the dataset raises, and
    for workers that are not forked: they take seconds to start.
    """
    context = loader.multiprocessing_context
    method = torch.multiprocessing.get_start_method() if context is None else context.get_start_method()
    if method != "fork" or isinstance(loader.dataset, IterableDataset):
        return None
    with muted(), preserved_rng():
        try:
            first, second = _epochs(loader, position, loader.worker_init_fn)
            found = WorkerDraws(
                workers=loader.num_workers,
                init=loader.worker_init_fn is not None,
                random=any(len(set(of_worker)) > 1 for of_worker in first),
                equal_workers=first[0] == first[1],
                equal_epochs=first == second and not loader.persistent_workers,
            )
            if found.random and (found.equal_workers or found.equal_epochs):
                first, second = _epochs(loader, position, _seeding(loader.worker_init_fn))
                found = replace(found, with_seeds=first[0] == first[1] or first == second)
            return found
        except Exception:  # raised by the user's dataset
            return None


def _epochs(loader: Loader, position: int, init: Callable[[int], None] | None) -> list[list[tuple[int, ...]]]:
    """Returns the digests that each of two workers read in each of two epochs."""
    twin = DataLoader(
        loader.dataset,
        batch_sampler=[[position, position], [position, position]],
        num_workers=2,
        collate_fn=_digests,
        worker_init_fn=init,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator().manual_seed(1),
        timeout=TIMEOUT_S,
    )
    return [list(twin) for _ in range(2)]


def _digests(samples: list[object]) -> tuple[int, ...]:
    return tuple([digest_of(leaves_of(sample)) for sample in samples])


def digest_of(leaves: Iterable[Tensor]) -> int:
    """Returns a hash of the values."""
    return hash(tuple([_bytes(leaf) for leaf in plain(leaves)]))


def _bytes(leaf: Tensor) -> bytes:
    return leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _seeding(before: Callable[[int], None] | None) -> Callable[[int], None]:
    """Returns a worker_init_fn that calls ``before`` and then seeds every generator in the dataset."""

    def init(worker: int) -> None:
        if before is not None:
            before(worker)
        info = get_worker_info()
        assert info is not None
        for generator in _walk(info.dataset):
            if isinstance(generator, _Generators):
                _seed(generator, torch.initial_seed() % 2**32)
        torch.manual_seed(info.seed)
        random.seed(info.seed)
        np.random.seed(info.seed % 2**32)

    return init


def _seed(generator: _Generators, seed: int) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    elif isinstance(generator, np.random.RandomState | random.Random):
        generator.seed(seed)
    else:
        generator.manual_seed(seed)
