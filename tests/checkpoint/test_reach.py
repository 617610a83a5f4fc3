"""Objects reachable from the user's code are captured and restored; objects that cannot be captured are named."""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import dataclasses
import functools
import io
import itertools
import os
import queue
import random
import socket
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trainwright.checkpoint import reach
from trainwright.checkpoint.reach import ReachableState, TensorData

COUNTED = [0]
CALLS = 0


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = [1]


@dataclasses.dataclass
class Record:
    value: int = 1
    inner: list[Slotted] = dataclasses.field(default_factory=lambda: [Slotted()])


class Classy:
    value = 1
    log: list[int] = []  # noqa: RUF012


def counts_in_globals() -> None:
    global CALLS
    CALLS += 1
    COUNTED[0] += 1


def counts_in_defaults(calls: list[int] = [0]) -> None:  # noqa: B006
    calls[0] += 1


def counts_in_attributes() -> None:
    counts_in_attributes.calls = 1  # type: ignore[attr-defined]


def closure() -> tuple[Callable[[], None], Callable[[], object]]:
    calls, seen = 0, [0]

    def count() -> None:
        nonlocal calls
        calls += 1
        seen.append(calls)

    return count, lambda: (calls, list(seen))


def called(function: Callable[[], object], times: int = 2) -> None:
    for _ in range(times):
        function()


def write_rng(rng: Any) -> None:
    rng.random()


def module() -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    made.log = {"a": ([1], np.zeros(3))}  # type: ignore[assignment]
    return made


def change_module(made: Any) -> None:
    made.log["a"][0].append(2)
    made.log["a"][1][:] += 1
    made.new = 1
    made[0].weight.data.add_(1)
    made[1].running_mean = torch.ones(2)
    made[0].register_forward_hook(print)
    made.eval()


COUNT, STATE = closure()
VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("VARIABLE")
CASES: dict[str, tuple[Any, Callable[[Any], object], Callable[[Any], object]]] = {
    "dict": ({"a": [1], "b": 2}, lambda d: (d.pop("a"), d.update(c=1)), repr),
    "ordered dict": (collections.OrderedDict(a=1, b=2), lambda d: d.move_to_end("a"), repr),
    "counter": (collections.Counter(a=1), lambda c: c.update("abc"), repr),
    "list in a tuple": (([1], (2, [3])), lambda t: (t[0].clear(), t[1][1].append(4)), repr),
    "deque": (collections.deque([1, 2], maxlen=2), lambda d: d.append(3), repr),
    "set": ({1, 2}, lambda s: s.add(3), sorted),
    "bytearray": (bytearray(3), lambda b: b.extend(b"x"), bytes),
    "array": (array.array("d", [0.0]), lambda a: a.append(1.0), list),
    "array of numpy": (np.arange(3), lambda a: a.__iadd__(1), lambda a: a.tolist()),
    "array of objects": (np.array([[1], None], dtype=object), lambda a: a[0].append(2), lambda a: a.tolist()),
    "tensor": (torch.arange(3.0), lambda t: t.mul_(2), lambda t: (t.tolist(), t._version)),
    "tensor by its data": (torch.zeros(2), lambda t: t.data.fill_(1), lambda t: t.tolist()),
    "complex tensor": (torch.zeros(2, dtype=torch.cfloat), lambda t: t.add_(1j), lambda t: t.tolist()),
    "not a number": (torch.full((2,), torch.nan), lambda t: t.neg_(), lambda t: t.view(torch.int32).tolist()),
    "sparse tensor": (torch.eye(2).to_sparse(), lambda t: t.mul_(2), lambda t: t.to_dense().tolist()),
    "booleans": (torch.zeros(2, dtype=torch.bool), lambda t: t.logical_not_(), lambda t: t.tolist()),
    "expanded tensor": (torch.zeros(1, 2).expand(3, 2), lambda t: t[0].fill_(1), lambda t: t.tolist()),
    "leaf": (
        torch.ones(2, requires_grad=True),
        lambda t: t.sum().backward(),
        lambda t: (t.grad, t.requires_grad),
    ),
    "tensor with a graph": (
        torch.ones(2),
        lambda t: t.add_(torch.ones(2, requires_grad=True)),
        lambda t: (t.tolist(), t.grad_fn, t.requires_grad),
    ),
    "generator of torch": (torch.Generator(), lambda g: torch.rand(1, generator=g), lambda g: g.get_state().tolist()),
    "generator of numpy": (np.random.default_rng(0), write_rng, lambda g: repr(g.bit_generator.state)),
    "random state": (np.random.RandomState(0), lambda g: g.rand(), lambda g: repr(g.get_state())),
    "random of python": (random.Random(0), write_rng, lambda g: g.getstate()),
    "bound method": (random.Random(0).random, lambda f: f(), lambda f: f.__self__.getstate()),
    "object": (
        Record(),
        lambda r: (setattr(r, "value", 2), setattr(r.inner[0], "value", 3)),  # type: ignore[func-returns-value]
        lambda r: (r.value, r.inner[0].value),
    ),
    "namespace": (types.SimpleNamespace(a=1), lambda n: vars(n).update(b=2), repr),
    "thread local": (threading.local(), lambda n: setattr(n, "a", 1), lambda n: vars(n).copy()),
    "class": (
        Classy,
        lambda c: (setattr(c, "value", 2), c.log.append(1), setattr(c, "new", 1)),  # type: ignore[func-returns-value]
        lambda c: (c.value, c.log, hasattr(c, "new")),
    ),
    "object of a class": (
        Classy(),
        lambda c: (setattr(type(c), "value", 2), c.log.append(1)),  # type: ignore[func-returns-value]
        lambda c: (c.value, c.log),
    ),
    "closure": (COUNT, called, lambda f: STATE()),
    "globals": (counts_in_globals, called, lambda f: (CALLS, COUNTED)),
    "default arguments": (counts_in_defaults, called, lambda f: f.__defaults__),
    "attributes of a function": (counts_in_attributes, called, lambda f: vars(f).copy()),
    "partial": (functools.partial(list.append, []), lambda f: f(1), lambda f: f.args),
    "file in memory": (io.StringIO("ab"), lambda f: f.write("xyz"), lambda f: (f.getvalue(), f.tell())),
    "context variable": (VARIABLE, lambda v: v.set(v.get(0) + 1), lambda v: v.get(0)),
    "module": (
        module(),
        change_module,
        lambda m: (m, m.training, dict(m.state_dict()), m.log, hasattr(m, "new")),
    ),
    "long list": (list(range(5000)), lambda values: values.clear(), len),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_changed_is_put_back(name: str) -> None:
    value, change, read = CASES[name]
    if name == "context variable":
        value.set(1)
    before = repr(read(value))
    state = ReachableState([("value", {"holder": [value]})])
    change(value)
    assert repr(read(value)) != before and state.gaps == []
    assert state.put_back() == [] and repr(read(value)) == before
    change(value)
    assert state.put_back() == [] and repr(read(value)) == before, "as often as needed"


def test_a_bound_name_is_the_same_object_again() -> None:
    holder = Record()
    inner, state = holder.inner, ReachableState([("value", holder)])
    holder.inner = []
    assert state.put_back() == [] and holder.inner is inner


GAPS: dict[str, tuple[Callable[[], Any], str]] = {
    "generator function": (lambda: (n for n in range(3)), "an iterator"),
    "iterator": (lambda: iter([1]), "an iterator"),
    "itertools": (itertools.count, "an iterator"),
    "file": (lambda: open(os.devnull, "w"), "an open file"),  # noqa: SIM115, PTH123
    "socket": (socket.socket, "a connection"),
    "executor": (lambda: ThreadPoolExecutor(1), "a thread"),
    "thread": (threading.Thread, "a thread"),
    "queue": (queue.Queue, "a queue"),
    "simple queue": (queue.SimpleQueue, "a queue"),
    "function of the system": (lambda: os.write, "os.write"),
}


@pytest.mark.parametrize("name", GAPS)
def test_what_cannot_be_captured_is_named(name: str) -> None:
    make, what = GAPS[name]
    value = make()
    try:
        state = ReachableState([("Model", types.SimpleNamespace(noise={"source": value}))])
    finally:
        getattr(value, "close", lambda: None)()
    assert state.gaps == [f"Model.noise.source is {what}"]


def test_what_can_only_be_compared_is_named_where_it_has_changed() -> None:
    number = ctypes.c_long(1)
    state = ReachableState([("Model", types.SimpleNamespace(number=number))])
    assert state.gaps == [] and state.put_back() == []
    number.value = 2
    assert state.put_back() == ["Model.number"]


def test_large_tensors_are_compared_by_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "MAX_COPIED_BYTES", 100)
    tensor, array_ = torch.zeros(1000), np.zeros(1000)
    state = ReachableState([("tensor", tensor), ("array", array_)])
    assert state.put_back() == [] and state.num_bytes == 0
    tensor.data.add_(1)
    array_ += 1
    assert sorted(state.put_back()) == ["array", "tensor"]


def test_a_graph_of_many_objects_is_not_followed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "MAX_OBJECTS", 50)
    assert "more than 50 objects" in ReachableState([("root", [[n] for n in range(100)])]).gaps[0]


def test_a_brief_capture_keeps_no_graph_and_no_history() -> None:
    model: Any = nn.Linear(2, 2)
    model.out, model.history = {"last": [model(torch.ones(2))]}, list(range(5000))
    state = ReachableState([("model", model)], is_brief=True)
    kept: list[object] = [getattr(part, "saved", None) for part, _ in state._parts.values()]
    assert not any(isinstance(each, list | dict) and len(each) > 1000 for each in kept)
    model.out, before = None, model.out
    model.history.append(1)
    assert state.put_back() == []
    assert model.out is None, "what holds a graph is left as it is"
    assert len(model.history) == 5000
    assert before["last"][0].grad_fn is not None


def test_what_is_known_is_not_captured() -> None:
    model = nn.Linear(2, 2)
    state = ReachableState([("model", model)], model.parameters())
    assert not any(isinstance(part, TensorData) for part, _ in state._parts.values())


def test_hooks_of_gradients_are_reached() -> None:
    seen: list[Tensor] = []
    weight = nn.Parameter(torch.ones(2))
    weight.register_hook(seen.append)  # type: ignore[no-untyped-call]
    state = ReachableState(reach.hooks_of_tensors([weight]))
    weight.sum().backward()
    assert seen and state.put_back() == [] and not seen


def test_settings_of_torch_are_put_back() -> None:
    state = ReachableState(())
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    assert state.put_back() == []
    assert torch.get_default_dtype() == torch.float32 and not torch.are_deterministic_algorithms_enabled()
