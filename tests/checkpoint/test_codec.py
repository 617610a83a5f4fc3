"""Nested state as tensors and JSON: what goes in comes out, bit for bit."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainwright.checkpoint.codec import decode, encode, same_bits
from trainwright.checkpoint.staging import on_host


def through_files(tree: Any, folder: Any) -> Any:
    tensors, value = encode(tree)
    save_file(on_host(tensors), folder / "t.safetensors")
    return decode(load_file(folder / "t.safetensors"), json.loads(json.dumps(value, allow_nan=False)))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and same_bits(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b)


TREES: list[Any] = [
    {"plain": [1, 2.5, None, True, "text", -0.0], "nested": {"deep": [{"er": ()}]}},
    {"floats": [math.nan, math.inf, -math.inf, 1e-310, 0.1]},
    {1: "int", "1": "str", None: 0, (2, "a"): "tuple", 2.5: 1},
    {True: "bool"},
    {"__tensor__": 1, "__tuple__": (1, 2), "__items__": {3: 4}, "__float__": "no"},
    {"a.b": torch.tensor(1.0), "a": {"b": torch.tensor(2.0)}, 3: torch.tensor(3.0), "3": torch.tensor(4.0)},
    (torch.arange(6).view(2, 3), [torch.tensor(True), torch.tensor(7, dtype=torch.int8)], {}),
    {"dtypes": [torch.ones(3, dtype=d) for d in (torch.bfloat16, torch.float16, torch.float64, torch.uint8)]},
    {"odd": [torch.empty(0, 4), torch.tensor(math.nan), torch.tensor([-0.0, 0.0]), torch.ones(()).expand(3)]},
    torch.tensor(5),
    {"precision": torch.bfloat16},
    [[], {}, (), ""],
    2**80,
]


@pytest.mark.parametrize("tree", TREES, ids=range(len(TREES)))
def test_round_trip(tree: Any, tmp_path: Any) -> None:
    assert same(through_files(tree, tmp_path), tree)


def test_random_trees(tmp_path: Any) -> None:
    rng = random.Random(0)

    def grow(depth: int) -> Any:
        kind = rng.randrange(4 if depth else 1)
        if kind == 0:
            return rng.choice(
                [rng.random(), rng.randrange(10**9), "x" * rng.randrange(4), None, torch.rand(rng.randrange(3))]
            )
        size = rng.randrange(4)
        if kind == 1:
            return {rng.choice([f"k.{i}", i, "__tensor__"]): grow(depth - 1) for i in range(size)}
        return (list if kind == 2 else tuple)(grow(depth - 1) for _ in range(size))

    for _ in range(200):
        tree = grow(4)
        assert same(through_files(tree, tmp_path), tree)


def test_a_tied_tensor_is_kept_once_and_a_view_apart() -> None:
    weight = torch.randn(4, 4)
    tensors, _ = encode({"embed": weight, "head": weight, "same memory": weight.view(4, 4), "transposed": weight.T})
    assert sorted(tensors) == ["embed", "transposed"]
    empty, _ = encode({"a": torch.empty(0), "b": torch.empty(0)})
    assert len(empty) == 2


def test_file_tensors_own_their_memory() -> None:
    live = torch.randn(4, 4)
    kept = on_host({"t": live.T})["t"]
    before = kept.clone()
    live.zero_()
    assert torch.equal(kept, before)
    assert kept.is_contiguous()


def test_what_cannot_be_kept_is_named_with_its_path() -> None:
    with pytest.raises(TypeError, match=r"^outer\.1\.inner: a set cannot be kept"):
        encode({"outer": [0, {"inner": {1}}]})


def test_same_bits_is_stricter_than_equality() -> None:
    nan = torch.tensor([math.nan, 1.0])
    assert same_bits(nan, nan.clone())
    assert same_bits(torch.tensor(1.5), torch.tensor(1.5))
    assert not same_bits(torch.tensor(1.5), torch.tensor(1.5000001))
    assert not same_bits(torch.tensor(0.0), torch.tensor(-0.0))
    assert not same_bits(torch.ones(2), torch.ones(2, dtype=torch.float64))
    assert not same_bits(torch.ones(2), torch.ones(2, 1))
    assert same_bits(torch.empty(0, 3), torch.empty(0, 3))
    assert not same_bits(torch.empty(0, 3), torch.empty(3, 0))
    assert same_bits(torch.eye(3).T, torch.eye(3))
    assert same_bits(torch.tensor([True]), torch.tensor([True]))


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_a_sparse_tensor_comes_back_and_one_of_another_layout_is_refused() -> None:
    graph = torch.eye(4).to_sparse()
    tensors, value = encode({"graph": graph})
    assert torch.equal(decode(tensors, value)["graph"].to_dense(), torch.eye(4))
    rows = torch.eye(4).to_sparse_csr()
    with pytest.raises(TypeError, match="graph: a Tensor cannot be kept"):
        encode({"graph": rows})
