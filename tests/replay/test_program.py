"""``tensors_of`` reads arguments and outputs of any structure in time that is linear in their size."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from trainwright.recorder.program import tensors_of


def cyclic() -> object:
    value = SimpleNamespace(x=torch.zeros(1))
    value.parent = SimpleNamespace(child=value)
    return value


def cyclic_list() -> object:
    value: list[object] = [torch.zeros(1)]
    value.append(value)
    return value


def shared() -> object:
    value: object = [torch.zeros(1)]
    for _ in range(16):  # 2 ** 16 paths lead to the tensor
        value = SimpleNamespace(a=value, b=value)
    return value


def shorter_path_last() -> object:
    inner = SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(x=torch.zeros(1))))
    return [[[[inner]]], inner]  # at depth 6, inner.a.b is out of reach by the first path


@pytest.mark.parametrize("make", [cyclic, cyclic_list, shared], ids=lambda make: make.__name__)
def test_what_is_referenced_several_times_is_read_once(make: Callable[[], object]) -> None:
    assert len(tensors_of(make(), 64)) == 1


def test_an_object_is_read_as_far_as_its_shortest_path_allows() -> None:
    assert len(tensors_of(shorter_path_last())) == 1


def test_a_tensor_that_stands_twice_in_one_container_is_returned_twice_in_order() -> None:
    x, y = torch.zeros(1), torch.ones(1)
    found = tensors_of({"a": (x, y), "b": [x, None, "text"]})
    assert [each is x for each in found] == [True, False, True]


def test_no_tensor_is_held_after_the_walk() -> None:
    value = [torch.zeros(1)]
    held = weakref.ref(value[0])
    gc.disable()
    try:
        tensors_of(value)
        value.clear()
        assert held() is None
    finally:
        gc.enable()
