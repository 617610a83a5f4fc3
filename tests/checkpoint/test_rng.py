"""The generators of random numbers: captured, put back, and not disturbed."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from trainwright.checkpoint import rng
from trainwright.checkpoint.codec import decode, encode
from trainwright.checkpoint.rng import (
    PythonState,
    RngBag,
    TwisterState,
    preserved_rng,
    read_python,
    seed_all,
    set_deterministic,
    write_python,
)


def draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.randn()),
        float(torch.randn(())),
        float(torch.rand(())),
    ]


@pytest.mark.parametrize("seed", [0, 7, 2**40 + 3, 2**63 - 1])
def test_seed_all_repeats_every_generator(seed: int) -> None:
    seed_all(seed)
    first = draw()
    seed_all(seed)
    assert draw() == first
    seed_all(seed - 1 if seed else 1)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_pythons_generator_is_read_and_put_back_as_its_module_does_it() -> None:
    random.seed(5)
    random.gauss(0, 1)  # and keeps the second half of a pair
    state = random.getstate()
    quick = read_python()
    assert quick.as_tuple() == state and PythonState.of(state) == quick
    expected = [random.gauss(0, 1), random.random(), random.getrandbits(70)]
    random.seed(6)
    write_python(quick)
    assert random.getstate() == state
    assert [random.gauss(0, 1), random.random(), random.getrandbits(70)] == expected


def test_it_is_read_by_its_module_where_memory_is_laid_out_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = read_python()
    monkeypatch.setattr(rng, "_memory", None)
    assert read_python() == quick
    expected = random.random()
    write_python(quick)
    assert random.random() == expected


@pytest.mark.parametrize("in_memory", [True, False])
def test_numpys_generator_goes_on_from_a_copy_of_its_memory(in_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rng._LIES_IN_MEMORY  # of the NumPy that is installed: else each copy would take 25 us
    monkeypatch.setattr(rng, "_LIES_IN_MEMORY", in_memory)
    twister, other = np.random.MT19937(7), np.random.MT19937(8)
    twister.random_raw(1000)
    copy = TwisterState.of(twister)
    after = twister.random_raw(1000)
    other.state = copy.as_dict()  # type: ignore[assignment]  # as RngBag has it
    assert np.array_equal(other.random_raw(1000), after)


def test_a_bag_survives_json_and_repeats_the_draws() -> None:
    seed_all(3)
    draw()  # numpy and random now hold the second half of a pair of normals
    tensors, value = encode(RngBag.capture().state_dict())
    expected = [draw() for _ in range(400)]
    RngBag.from_state_dict(decode(tensors, json.loads(json.dumps(value)))).restore()
    assert [draw() for _ in range(400)] == expected


def test_preserved_rng_even_when_it_raises() -> None:
    seed_all(3)
    expected = draw()
    seed_all(3)
    with pytest.raises(ZeroDivisionError), preserved_rng():
        draw()
        raise ZeroDivisionError
    assert draw() == expected


@pytest.mark.parametrize("spare", [0, 1], ids=["no spare normal", "a spare normal"])
@pytest.mark.parametrize("inside", [0, 1, 2, 3], ids=lambda number: f"{number} inside")
def test_what_is_drawn_inside_of_preserved_rng_leaves_no_trace(spare: int, inside: int) -> None:
    """One normal of NumPy after another: the second of a pair is kept, and does not move the words."""
    seed_all(3)
    for _ in range(spare):
        np.random.randn()
    before = RngBag.capture()
    with preserved_rng():
        for _ in range(inside):
            np.random.randn(), random.gauss(0.0, 1.0), torch.rand(3)
    drawn = draw()
    before.restore()
    assert draw() == drawn


def test_a_bag_of_a_machine_with_more_gpus_still_restores() -> None:
    bag = RngBag.capture()
    absent = torch.zeros(16, dtype=torch.uint8)
    expected = torch.randn(4)
    RngBag(bag.python, bag.numpy, bag.torch_cpu, (*bag.torch_cuda, absent, absent)).restore()
    assert torch.equal(torch.randn(4), expected)


def test_deterministic_refuses_what_has_no_deterministic_kernel() -> None:
    set_deterministic()
    try:
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
