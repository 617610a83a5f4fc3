"""Checks of the model on measurements: each fires on its mechanism and is silent on what looks like it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.doctor.checks.loops import made_of, requested
from trainwright.doctor.check import Check
from trainwright.doctor.discovery import check_of
from trainwright.doctor.facts.layers import (
    Deviation,
    DropoutFacts,
    FirstLossFacts,
    FunctionFacts,
    LayerGradient,
    LayersFacts,
    ModulesFacts,
    NormFacts,
    OutputSpread,
    PaddedFacts,
    ReluFacts,
    RouterFacts,
)
from trainwright.doctor.facts.weights import AveragesFacts, CopyFacts, Move, WeightsFacts
from trainwright.doctor.facts.wiring import ActivatedFacts, Chain, WiringFacts
from trainwright.doctor.finding import ExperimentRequest


def of(code: str) -> Check:
    check = check_of(code)
    assert check is not None
    return check


def fires(code: str, *facts: tuple[int, object]) -> bool:
    return bool(made_of(of(code), *facts))


def wired(**values: Any) -> WiringFacts:
    return WiringFacts(**{"trained": 4, "trained_beside_norms": 4, "frozen_beside_norms": 0} | values)


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ((64, 20), (64, 64), True),
        ((8, 64), (64, 8), False),  # a factorisation: 64 -> 8 -> 64
        ((16, 8, 3, 3), (16, 16, 3, 3), True),
        ((16, 8, 1, 3), (16, 16, 3, 1), False),  # a kernel in two factors
    ],
)
def test_two_linear_layers_in_a_row(first: tuple[int, ...], second: tuple[int, ...], found: bool) -> None:
    chain = Chain(first="a.weight", second="b.weight", first_shape=first, second_shape=second)
    tried = (1, ActivatedFacts(unchanged=0.4, activated=0.01))
    assert fires("model.missing_nonlinearity", (1, wired(chains=(chain,))), tried) == found


@pytest.mark.parametrize(("activated", "severity"), [(0.01, "warning"), (0.39, "info")])
def test_linear_layers_that_lose_nothing_are_an_info(activated: float, severity: str) -> None:
    chain = Chain(first="a.weight", second="b.weight", first_shape=(64, 20), second_shape=(64, 64))
    tried = (1, ActivatedFacts(unchanged=0.4, activated=activated))
    [found] = made_of(of("model.missing_nonlinearity"), (1, wired(chains=(chain,))), tried)
    assert found.severity == severity


@pytest.mark.parametrize(
    ("is_batch", "amount", "severity"), [(True, 1.0, "warning"), (True, 0.01, "info"), (False, 1.0, None)]
)
def test_mixed_samples(is_batch: bool, amount: float, severity: str | None) -> None:
    facts = FunctionFacts(neighbours=Deviation(amount, 1e-4, "rnn"), is_batch=is_batch)
    found = made_of(of("model.mixes_samples"), (1, facts))
    assert [each.severity for each in found] == ([severity] if severity else [])


@pytest.mark.parametrize(("amount", "found"), [(1.0, True), (1e-6, False)])
def test_outputs_that_depend_on_the_place_in_the_batch(amount: float, found: bool) -> None:
    facts = FunctionFacts(is_batch=True, place=Deviation(amount, 1e-4, "position"))
    assert fires("model.depends_on_batch_position", (1, facts)) == found


@pytest.mark.parametrize(
    ("amount", "pad", "severity"), [(1.0, "a mask", "warning"), (1.0, "", "info"), (1e-6, "", None)]
)
def test_padding(amount: float, pad: str, severity: str | None) -> None:
    found = made_of(of("model.padding_changes_output"), (1, PaddedFacts(padding=Deviation(amount, 1e-4), pad=pad)))
    assert [each.severity for each in found] == ([severity] if severity else [])


def test_gradients_that_fall_with_the_depth() -> None:
    slope = tuple(LayerGradient(module=str(n), size=10.0 ** (n - 12)) for n in range(12))
    even = tuple(LayerGradient(module=each.module, size=1e-12) for each in slope)
    assert fires("gradient.vanishing", (1, LayersFacts(depth=slope)))
    assert not fires("gradient.vanishing", (1, LayersFacts(depth=even)))
    assert not fires("gradient.vanishing", (1, LayersFacts(depth=slope, is_fp16=True)))


@pytest.mark.parametrize(
    ("falls_at_first", "step", "is_of_updates"), [(False, 8, True), (False, 128, False), (True, 8, False)]
)
def test_gradients_that_fall_after_the_first_updates(falls_at_first: bool, step: int, is_of_updates: bool) -> None:
    slope = tuple(LayerGradient(module=str(n), size=10.0 ** (n - 12)) for n in range(12))
    even = tuple(LayerGradient(module=each.module, size=1.0) for each in slope)
    first, later = LayersFacts(depth=slope if falls_at_first else even), LayersFacts(depth=slope)
    (found,) = made_of(of("gradient.vanishing"), (1, first), (step, later), (step + 128, later))
    assert ("learning rate" in found.cause) is is_of_updates


@pytest.mark.parametrize(("dead", "varies", "found"), [(1.0, 1.0, True), (0.1, 1.0, False), (1.0, 0.0, False)])
def test_dead_units(dead: float, varies: float, found: bool) -> None:
    relu = ReluFacts(dead=dead, varies=varies, rows=64, furthest=-10.0)
    assert fires("model.dead_relu", (1, LayersFacts(relus={"1": relu}))) == found


def norms(**values: Any) -> LayersFacts:
    return LayersFacts(norms={"bn": NormFacts(**{"samples": 64, "values": 64, "calls": 1, "momentum": 0.1} | values)})


def test_a_short_last_batch_is_no_tiny_batch() -> None:
    tiny, large = norms(samples=2, values=2), norms()
    assert fires("model.bn_tiny_batch", (1, tiny), (2, tiny))
    assert not fires("model.bn_tiny_batch", (1, large), (2, tiny))


@pytest.mark.parametrize(("updates", "momentum", "found"), [(2, 0.1, True), (1, 0.1, False), (2, 0.0513, False)])
def test_statistics_that_are_moved_twice(updates: int, momentum: float, found: bool) -> None:
    assert fires("model.bn_double_update", (1, norms(updates=updates, momentum=momentum))) == found


@pytest.mark.parametrize(("course", "found"), [((7, 6, 4, 2, 1.5, 1.2), True), ((3.5, 3.6, 3.4, 3.5, 3.6), False)])
def test_routers(course: Sequence[float], found: bool) -> None:
    looks = [LayersFacts(routers={"r": RouterFacts(experts=8, effective=each, most=0.5)}) for each in course]
    assert fires("model.router_collapse", *enumerate(looks, 1)) == found


def test_strong_dropout() -> None:
    seen = (16, LayersFacts(dropout={"4": 0.9}))
    assert requested(of("model.excess_dropout"), (1, seen[1])) == []  # nothing is learned yet
    assert requested(of("model.excess_dropout"), seen) == [ExperimentRequest("dropout_gap", 16)]
    assert fires("model.excess_dropout", seen, (16, DropoutFacts(with_dropout=2.0, without=1.5)))
    assert not fires("model.excess_dropout", seen, (16, DropoutFacts(with_dropout=2.0, without=1.99)))


@pytest.mark.parametrize(("size", "rescaled", "found"), [(1.0, 3.6, True), (255.0, 3.6, False), (1.0, 18.0, False)])
def test_too_large_needs_normal_inputs_and_a_remedy_that_works(size: float, rescaled: float, found: bool) -> None:
    facts = FirstLossFacts(loss=20.0, classes=33, input_size=size, large={"head.weight": 8.0}, rescaled=rescaled)
    assert fires("model.init_too_large", (1, facts)) == found


@pytest.mark.parametrize(("last", "found"), [(0.05, True), (0.4, False)])
def test_codes_that_collapse(last: float, found: bool) -> None:
    spreads = tuple(OutputSpread(step=n, spread=0.6 if n < 4 else last) for n in range(1, 9))
    assert fires("model.representations_collapse", (8, ModulesFacts(looks=8, last=8, spreads=spreads))) == found


def followed(share: float, *, growth: float = 0.0, gap: float = 0.01, is_resumed: bool = False) -> AveragesFacts:
    rest_alone = 0.5 if growth else 1e-6
    moves = tuple(Move(n, share, growth, 1e-6, rest_alone) for n in range(9, 15))
    copy = CopyFacts("Net", "Net", moves, gap)
    return AveragesFacts(6, is_resumed, (copy,))


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        (followed(0.01), False),
        (followed(0.4), True),
        (followed(0.99), True),
        (followed(-0.1), True),
        (followed(0.01, growth=-0.05), True),
    ],
    ids=[
        "an average",
        "an average of two steps",
        "factors swapped",
        "outside of 0 and 1",
        "factors that do not add up",
    ],
)
def test_averages_that_do_not_follow(facts: AveragesFacts, found: bool) -> None:
    assert fires("optim.average_does_not_follow", (15, facts)) == found


@pytest.mark.parametrize(
    ("dtype", "still", "rest", "found"),
    [("bfloat16", 0.9, 0.9, True), ("", 0.9, 0.9, False), ("bfloat16", 0.1, 0.9, False), ("bfloat16", 0.9, 0.1, False)],
    ids=["lost by rounding", "float32", "moves", "follows"],
)
def test_averages_in_16_bits_that_stand_still(dtype: str, still: float, rest: float, found: bool) -> None:
    moves = tuple(Move(n, 1e-3, 0.0, rest, rest, still) for n in range(9, 15))
    facts = AveragesFacts(6, False, (CopyFacts("Net", "Net", moves, dtype=dtype),))
    assert fires("optim.average_does_not_follow", (15, facts)) == found


@pytest.mark.parametrize(("gap", "is_resumed", "found"), [(1.0, True, True), (0.02, True, False), (1.0, False, False)])
def test_averages_that_were_not_restored(gap: float, is_resumed: bool, found: bool) -> None:
    facts = followed(0.03, gap=gap, is_resumed=is_resumed)
    assert fires("checkpoint.average_not_restored", (15, facts)) == found


@pytest.mark.parametrize(
    ("moved", "updates", "found"), [(0, 4, True), (0, 3, False), (8, 60, False)], ids=["none", "too early", "all"]
)
def test_weights_that_never_move(moved: int, updates: int, found: bool) -> None:
    facts = WeightsFacts(steps=updates, updates=updates, tensors=8, moved=moved, has_gradient=True)
    assert fires("optim.weights_never_move", (updates, facts)) == found


def test_weights_that_move_no_longer() -> None:
    facts = WeightsFacts(
        steps=99, updates=99, tensors=8, moved=8, has_gradient=True, stands_since=50, updates_since=49, highest_rate=0.1
    )
    assert fires("optim.weights_never_move", (99, facts))


@pytest.mark.parametrize(("updates", "found"), [(40, True), (4, False)])
def test_matrices_whose_gradient_is_always_0(updates: int, found: bool) -> None:
    facts = WeightsFacts(steps=updates, updates=updates, tensors=8, moved=7, has_gradient=True, zero_gradients=("a.w",))
    assert fires("optim.weights_never_move", (updates, facts)) == found


@pytest.mark.parametrize(("name", "found"), [("rnn.weight_hh_l0_reverse", True), ("fc.weight", False)])
def test_recurrent_weights_whose_gradient_is_always_0(name: str, found: bool) -> None:
    facts = WeightsFacts(steps=9, updates=9, tensors=8, moved=7, has_gradient=True, zero_gradients=(name,))
    assert fires("model.recurrence_unused", (9, facts)) == found
