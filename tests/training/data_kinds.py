"""Kinds of data. Each process that trains on one creates it. An epoch of most kinds has 5 batches of 8 samples."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from trainwright.data.images import Images
from trainwright.data.mixture import mix
from trainwright.data.read_files import OpenFiles, files
from trainwright.data.table import table
from trainwright.data.tokens import Tokens

SIZE, BATCH = 40, 8
X = torch.arange(SIZE * 4, dtype=torch.float32).reshape(SIZE, 4) / SIZE
Y = torch.arange(SIZE) % 3


class Kind(NamedTuple):
    """``make`` creates the data. ``exact``: a killed run must resume with the same bits."""

    name: str
    make: Callable[[], Any]
    exact: bool = True


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise from all global generators."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(4) + np.random.rand() + random.random()
        return X[index] + 0.01 * noise.float(), Y[index]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Shuffled through a buffer. Each worker reads every n-th sample."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info, rows = get_worker_info(), Rows()
        mine = range(SIZE) if info is None else range(info.id, SIZE, info.num_workers)
        buffer: list[int] = []
        for index in mine:
            buffer.append(index)
            if len(buffer) == 5:
                yield rows[buffer.pop(int(torch.randint(5, ())))]
        yield from (rows[index] for index in buffer)


class ReadyStream(Stream):
    """Yields batches instead of samples."""

    def __iter__(self) -> Iterator[Any]:
        items = list(super().__iter__())
        for start in range(0, SIZE, BATCH):
            x, y = zip(*items[start : start + BATCH], strict=True)
            yield torch.stack(x), torch.stack(y)


def batches() -> list[tuple[Tensor, Tensor]]:
    return list(zip(X.split(BATCH), Y.split(BATCH), strict=True))


class OfGenerator(Sampler[int]):
    """Draws from its own generator: of torch, NumPy or ``random``."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        if isinstance(self.generator, torch.Generator):
            return iter(torch.randperm(SIZE, generator=self.generator).tolist())
        if isinstance(self.generator, np.random.Generator):
            return iter(self.generator.permutation(SIZE).tolist())
        return iter(self.generator.sample(range(SIZE), SIZE))


class CountsEpochs(Sampler[int]):
    """Has no ``set_epoch``: it counts the epochs."""

    epoch = 0

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Unrepeatable(CountsEpochs):
    """Draws from the machine's entropy."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng().permutation(SIZE).tolist())


class ByLength(Sampler[list[int]]):
    """Batches of samples of similar length in random order. They have at most 80 tokens, so their sizes differ."""

    def __init__(self) -> None:
        self.lengths = [1 + 7 * i % 19 for i in range(SIZE)]

    def __iter__(self) -> Iterator[list[int]]:
        noisy = sorted(range(SIZE), key=lambda index: self.lengths[index] + 3 * random.random())
        found, batch = [], list[int]()
        for index in noisy:
            if sum(self.lengths[i] for i in batch) + self.lengths[index] > 80:
                found.append(batch)
                batch = []
            batch.append(index)
        random.shuffle(found)
        yield from [*found, batch]


class Graphs:
    """A batch of graphs as in graph libraries: the nodes of all graphs in one tensor, and the graph of each node."""

    def __init__(self, items: list[tuple[Tensor, Tensor]]) -> None:
        sizes = torch.tensor([1 + int(y) for _, y in items])
        self.x = torch.cat([x.expand(int(n), 4) for (x, _), n in zip(items, sizes, strict=True)])
        self.batch = torch.repeat_interleave(torch.arange(len(items)), sizes)
        self.y = torch.stack([y for _, y in items])


class ReadyGraphs:
    def __iter__(self) -> Iterator[Graphs]:
        for x, y in batches():
            yield Graphs(list(zip(x, y, strict=True)))


class Shuffled:
    """Like WebLoader: an iterable without a length that shuffles with the global generators."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        items = batches()
        random.shuffle(items)
        for x, y in items:
            yield x + 0.01 * torch.randn(()), y


class Resets:
    """Like DALI: its own iterator, which begins again after ``reset()`` and yields lists of dicts."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Resets:
        return self

    def __next__(self) -> list[dict[str, Tensor]]:
        if self.at == SIZE:
            raise StopIteration
        some = slice(self.at, self.at + BATCH)
        self.at += BATCH
        return [{"data": X[some], "label": Y[some]}]

    def reset(self) -> None:
        self.at = 0


class Stateful:
    """Like StatefulDataLoader or mosaic streaming: it prefetches, and its state has the number of yielded batches."""

    def __init__(self, extra: Any = None) -> None:
        self.given, self.epoch, self.extra, self._from = 0, 0, extra, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(5, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.given, self._from = self._from, 0
        ahead = [batches()[i] for i in order[self.given :]][::-1]
        while ahead:
            x, y = ahead.pop()
            self.given += 1
            yield x + 0.01 * torch.randn(()), y
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "epoch": self.epoch, "seen": torch.arange(self.given), "extra": self.extra}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert len(state["seen"]) == state["given"]
        self._from, self.epoch = state["given"], state["epoch"]


class StatefulIterator:
    """Like Grain: the iterator has the state, and batches are NumPy arrays."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> StatefulIterator:
        return self

    def __next__(self) -> dict[str, Any]:
        if self.at == 5:
            raise StopIteration
        x, y = batches()[self.at]
        self.at += 1
        return {"x": x.numpy() + np.float32(0.01) * np.random.rand(), "y": y.numpy()}

    def get_state(self) -> dict[str, int]:
        return {"at": self.at}

    def set_state(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class OfStatefulIterators:
    def __iter__(self) -> StatefulIterator:
        return StatefulIterator()


class Entropy:
    """No two passes are the same."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in batches():
            yield x + int.from_bytes(os.urandom(2), "little") / 2**16, y


class OfDicts(Dataset[dict[str, Tensor]]):
    """Like a Hugging Face Dataset with ``set_format("torch")``: rows are dicts, and several are read at once."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": X[index], "y": Y[index]}

    def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
        return [self[index] for index in indices]


def token_file() -> Tokens:
    path = Path(tempfile.mkdtemp()) / "ids.bin"
    (np.arange(4 * SIZE + 1) % 250).astype(np.uint16).tofile(path)
    return Tokens(path, block_size=4)


def images() -> Images:
    from PIL import Image

    folder = Path(tempfile.mkdtemp())
    for at, (x, y) in enumerate(zip(X, Y.tolist(), strict=True)):
        (folder / f"class-{y}").mkdir(exist_ok=True)
        pixels = (255 * x / X.max()).byte().reshape(2, 2).numpy()
        Image.fromarray(pixels).save(folder / f"class-{y}" / f"{at:02}.png")
    return Images(folder, size=2, grey=True)


def rows_of_table() -> Any:
    columns = {name: X[:, at].numpy() for at, name in enumerate("abcd")}
    return table(columns | {"kind": Y.numpy()}, inputs=list("abcd"), target="kind")


def mixture() -> Any:
    return mix({"many": Rows(), "few": Subset(Rows(), range(5))}, {"many": 0.6, "few": 0.4})


def of(dataset: Any, **settings: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(dataset() if isinstance(dataset, type) else dataset, **settings)


def sampled(sampler: Callable[[], Any], **settings: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(Rows(), BATCH, sampler=sampler(), **settings)


def distributed() -> DataLoader[Any]:
    rows = Rows()
    return DataLoader(rows, BATCH, sampler=DistributedSampler(rows, num_replicas=1, rank=0))


class Subclass(DataLoader[Any]):
    """Like Accelerate's loaders: a DataLoader with its own ``__iter__``."""

    def __iter__(self) -> Any:
        return ((x * 0.5, y) for x, y in super().__iter__())


def in_files() -> OpenFiles:
    """Three files of different sizes, whose samples are augmented when they are read."""

    def read(path: str) -> Iterator[tuple[Tensor, Tensor]]:
        first = int(path)
        for index in range(first, min(first + 15, SIZE)):
            yield X[index] + 0.01 * torch.randn(4) + random.random(), Y[index]

    return files(["0", "15", "30"], read)


KINDS = [
    Kind("tuple of tensors", lambda: (X, Y)),
    Kind("tuple of NumPy arrays", lambda: (X.numpy(), Y.numpy())),
    Kind("dict of tensors or arrays", lambda: {"x": X, "y": Y.numpy()}),
    Kind("list of samples", lambda: list(zip(X, Y, strict=True))),
    Kind("`Dataset`, augmented from the global generators", Rows),
    Kind("`Dataset` of dicts with `__getitems__`", OfDicts),
    Kind("dict of datasets, `train` and `validation`", lambda: {"train": OfDicts(), "validation": OfDicts()}),
    Kind("token ids in a file (`tokens`)", token_file),
    Kind("table (`tw.table`)", rows_of_table),
    Kind("folder of images (`images`)", images),
    Kind("datasets mixed by weights (`tw.mix`)", mixture),
    Kind("files that are read from the beginning (`tw.files`)", in_files),
    Kind("the same with a worker", lambda: DataLoader(in_files(), BATCH, shuffle=True, num_workers=1)),
    Kind("`IterableDataset` of samples, with a shuffle buffer", Stream),
    Kind("`DataLoader(shuffle=True)`", of(Rows, batch_size=BATCH, shuffle=True)),
    Kind("`DataLoader` with 2 workers", of(Rows, batch_size=BATCH, shuffle=True, num_workers=2)),
    Kind("`WeightedRandomSampler`", sampled(lambda: WeightedRandomSampler([1.0 + i for i in range(SIZE)], SIZE))),
    Kind("the same with 2 workers", sampled(lambda: WeightedRandomSampler([1.0] * SIZE, SIZE), num_workers=2)),
    Kind("`SubsetRandomSampler`", sampled(lambda: SubsetRandomSampler(range(3, 39)))),
    Kind("`RandomSampler` with replacement", sampled(lambda: RandomSampler(range(SIZE), True, 37))),
    Kind("`DistributedSampler` of one replica", distributed),
    Kind("sampler with a generator of torch", sampled(lambda: OfGenerator(torch.Generator()))),
    Kind("sampler with a generator of NumPy", sampled(lambda: OfGenerator(np.random.default_rng(3)))),
    Kind("sampler with a `random.Random`", sampled(lambda: OfGenerator(random.Random(3)))),
    Kind("sampler that counts its epochs itself", sampled(CountsEpochs)),
    Kind("sampler that draws from the machine's entropy", sampled(Unrepeatable), exact=False),
    Kind(
        "batch sampler: a list of lists",
        lambda: DataLoader(Rows(), batch_sampler=[[0, 1, 2], [3], [4, 5], [6, 7, 8, 9]]),
    ),
    Kind(
        "batch sampler of torch", lambda: DataLoader(Rows(), batch_sampler=BatchSampler(SequentialSampler(X), 8, True))
    ),
    Kind("batch sampler by length, equal numbers of tokens", lambda: DataLoader(Rows(), batch_sampler=ByLength())),
    Kind("the same, collated to graphs", lambda: DataLoader(Rows(), batch_sampler=ByLength(), collate_fn=Graphs)),
    Kind(
        "`DataLoader(list of batches, batch_size=None)`", lambda: DataLoader(batches(), batch_size=None, shuffle=True)
    ),
    Kind("`DataLoader(IterableDataset of batches, batch_size=None)`", of(ReadyStream, batch_size=None)),
    Kind("`IterableDataset` with 2 workers", of(Stream, batch_size=BATCH, num_workers=2)),
    Kind(
        "the same with `persistent_workers`",
        of(Stream, batch_size=BATCH, num_workers=2, persistent_workers=True),
        exact=False,
    ),
    Kind("subclass of `DataLoader` with its own `__iter__`", lambda: Subclass(Rows(), BATCH, shuffle=True)),
    Kind("loader with `state_dict`, as of torchdata and mosaic streaming", Stateful),
    Kind(
        "loader that counts its epochs itself, and whose state holds an object", lambda: Stateful(object()), exact=False
    ),
    Kind("iterable whose iterator has `get_state`, as of Grain", OfStatefulIterators),
    Kind("iterable of batches that shuffles", Shuffled),
    Kind("iterator with `reset()`, as of DALI", Resets),
    Kind("iterable of graphs", ReadyGraphs),
    Kind("iterable that is never twice the same", Entropy, exact=False),
    Kind("function that makes an iterator", lambda: lambda: iter(batches())),
    Kind("generator", lambda: iter(batches() * 3)),
    Kind(
        "`TensorDataset` in a loader with a sampler",
        lambda: DataLoader(TensorDataset(X, Y), BATCH, sampler=CountsEpochs()),
    ),
]


def parts_of(batch: Any) -> tuple[Tensor, Tensor]:
    """Returns inputs and targets of a batch of any kind."""
    if isinstance(batch, Graphs):
        return torch.zeros(len(batch.y), 4).index_add_(0, batch.batch, batch.x), batch.y
    if isinstance(batch, list) and isinstance(batch[0], dict):
        (batch,) = batch
    if isinstance(batch, dict):
        x, y = batch.values()
        return x, y
    x, y = batch
    if y.dim() == 2:  # tokens
        return x.float(), y[:, 0] % 3
    return x.flatten(1), y
