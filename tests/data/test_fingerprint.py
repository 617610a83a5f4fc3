"""Fingerprints: equal for equal data, different for other data, and nothing disturbed."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from trainwright.data import fingerprint as module
from trainwright.data import fork
from trainwright.data.fingerprint import fingerprint
from trainwright.data.text import CharText
from trainwright.errors import DataError


class Listed(Dataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Noisy(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, float, float]:
        return torch.randn(2), random.random(), float(np.random.rand())


class Plain:
    """Its repr holds an address."""


@dataclass
class Pair:
    image: Tensor
    label: int


class Image:
    """Has the interface of a PIL image."""

    def __init__(self, content: bytes) -> None:
        self.mode, self.size, self.content = "L", (2, 2), content

    def tobytes(self) -> bytes:
        return self.content

    def __repr__(self) -> str:
        return f"Image({self.content!r})"


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash items without a fork, which takes longer, where only their values matter."""
    monkeypatch.setattr(fork, "CAN_FORK", False)


def sha(items: list[Any]) -> str:
    return fingerprint(Listed(items)).sha256


def test_tensor_datasets_are_hashed_whole() -> None:
    x = torch.randn(5000, 3)
    first = fingerprint(TensorDataset(x, torch.arange(5000)))
    changed = x.clone()
    changed[4321, 1] += 1
    assert first == fingerprint(TensorDataset(x.clone(), torch.arange(5000)))
    assert first.how == "the whole content" and len(first.sha256) == 64
    assert first.sha256 != fingerprint(TensorDataset(changed, torch.arange(5000))).sha256


def test_tensor_datasets_beyond_the_limit_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES_FULLY_HASHED", 1000)
    print_ = fingerprint(TensorDataset(torch.zeros(5000, 3)))
    assert print_.how.startswith("the type, the length and 6") and print_.how.endswith("of 5000 items")


def test_our_own_datasets_are_hashed_by_their_content() -> None:
    data = CharText("abc" * 1000, block_size=8)
    assert fingerprint(data).sha256 == data.content_sha256()
    assert fingerprint(data).sha256 != fingerprint(CharText("abd" * 1000, block_size=8)).sha256


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("item", "other"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.tensor(1.0), torch.tensor(2.0)),
        (torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)),
        (torch.tensor([True]), torch.tensor([False])),
        (torch.arange(6).view(2, 3).T, torch.arange(6).view(3, 2)),
        (torch.eye(2).to_sparse(), torch.zeros(2, 2).to_sparse()),
        (np.zeros(2), np.zeros(2, dtype=np.float32)),
        (np.float32(1), np.float64(1)),
        (np.array(["a", None], dtype=object), np.array(["b", None], dtype=object)),
        (1, "1"),
        (1, True),
        (1, 1.0),
        ("é", "e"),
        (b"a", "a"),
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
        (("ab", "c"), ("a", "bc")),
        (([1], 2), (1, [2])),
        (Pair(torch.zeros(1), 1), Pair(torch.ones(1), 1)),
        (Image(b"0123"), Image(b"0124")),
        (None, 0),
    ],
    ids=str,
)
def test_items_of_every_kind_are_told_apart(item: Any, other: Any) -> None:
    assert sha([item]) == sha([item])
    assert sha([item]) != sha([other])
    assert sha([item, other]) != sha([other, item])


@pytest.mark.usefixtures("in_this_process")
def test_equal_items_hash_alike_whatever_their_memory() -> None:
    assert sha([{"b": 2, "a": 1}]) == sha([{"a": 1, "b": 2}])
    assert sha([Plain()]) == sha([Plain()])
    assert sha([torch.arange(6).view(2, 3).T]) == sha([torch.arange(6).view(2, 3).T.contiguous()])


@pytest.mark.usefixtures("in_this_process")
def test_large_datasets_are_sampled_alike_each_time() -> None:
    items = list(range(10_000))
    first = fingerprint(Listed(items))
    assert first == fingerprint(Listed(items))
    assert first.how.endswith("of 10000 items")
    for changed in (items[:-1], [*items[:-1], -1], [-1, *items[1:]], items[::-1]):
        assert fingerprint(Listed(changed)).sha256 != first.sha256
    assert fingerprint(Listed(items[:256])).how == "all 256 items"


@pytest.mark.parametrize("size", [10, 1000])
def test_random_items_hash_alike_and_disturb_no_generator(size: int) -> None:
    of_numpy: Any = np.random.get_state()
    before = (torch.get_rng_state(), random.getstate(), of_numpy[1].copy())
    first = fingerprint(Noisy(size))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    of_numpy = np.random.get_state()
    assert np.array_equal(of_numpy[1], before[2])
    torch.manual_seed(99)
    assert fingerprint(Noisy(size)) == first


def test_a_stream_is_not_read() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("read")

    assert fingerprint(Stream()).how.startswith("the type only")


def test_an_item_that_cannot_be_read_does_not_end_the_run() -> None:
    class Broken(Listed):
        def __getitem__(self, index: int) -> Any:
            if index == 1:
                raise OSError("truncated")
            return self.items[index]

    assert fingerprint(Broken([1, 2, 3])).how == "all 3 items"
    assert fingerprint(Broken([1, 2, 3])) == fingerprint(Broken([1, 5, 3]))


class Trouble(Listed):
    """Something befalls who reads items 0 or 7."""

    def __init__(self, size: int, befalls: Callable[[], object], at: tuple[int, ...] = (0, 7)) -> None:
        super().__init__(list(range(size)))
        self.befalls, self.at = befalls, at

    def __getitem__(self, index: int) -> Any:
        if index in self.at:
            self.befalls()
        return super().__getitem__(index)


@pytest.mark.parametrize("size", [10, 1000])
def test_an_item_that_ends_the_process_is_named(size: int) -> None:
    with pytest.raises(DataError, match="ended with exit code 3 while it read sample 0") as caught:
        fingerprint(Trouble(size, lambda: os._exit(3)))
    assert caught.value.sample_ids == (0,) and "data.quarantine: [0]" in caught.value.remedy


def test_what_is_left_out_is_not_read() -> None:
    found = fingerprint(Trouble(10, lambda: os._exit(3)), left_out={0, 7})
    assert found.how == "all 10 items, without those in quarantine"
    assert found.sha256 != fingerprint(Listed(list(range(10)))).sha256
    assert fingerprint(Listed(list(range(10))), left_out={77}).how == "all 10 items"


@pytest.mark.parametrize(("each_s", "number"), [(0.035, 16), (0.6, 4)])
def test_of_slow_items_fewer_are_read(
    each_s: float, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items are read in a forked process, which counts them in a file."""
    reads = tmp_path / "reads"
    reads.touch()

    def read_slowly() -> None:
        with reads.open("a") as file:
            file.write("x")

    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: each_s * reads.stat().st_size))
    slow = Trouble(200, read_slowly, at=tuple(range(200)))
    first = fingerprint(slow)
    assert reads.stat().st_size == number
    assert first.how == f"only {number} of 200 items, as they are slow to read"
    assert first == fingerprint(slow)
    slow.items = [-1] * 200
    assert fingerprint(slow).sha256 != first.sha256


@pytest.mark.slow
def test_where_not_even_the_first_items_come_none_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT_S", 0.5)
    found = fingerprint(Trouble(200, lambda: time.sleep(300)))
    assert found.how == "type and length only: none of 200 items could be read in time"


def test_an_item_that_only_the_process_with_the_gpu_can_read() -> None:
    def initialise() -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    assert fingerprint(Trouble(20, initialise)).how == "type and length only: the 20 items are on a GPU"
