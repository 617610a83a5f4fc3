"""Checks of model and initialisation: each fires on its mechanism and is silent on what looks like it."""

from __future__ import annotations

from typing import Any

from tests.rows import each_row
from trainwright.doctor.case import Case
from trainwright.doctor.finding import Check, ExperimentRequest, Finding
from trainwright.doctor.function.names import layers, structure
from trainwright.runlog.records import Examined, Watched


def said(check: Check, *told: tuple[int, str, dict[str, Any]]) -> list[Finding | ExperimentRequest]:
    records = [Examined(time_s=0.0, step=step, experiment=name, values=values) for step, name, values in told]
    return list(check(Case(records)))


def codes(check: Check, *told: tuple[int, str, dict[str, Any]]) -> list[str]:
    return [each.found.code for each in said(check, *told) if isinstance(each, Finding)]


def look(**values: Any) -> dict[str, Any]:
    empty: dict[str, Any] = {"relus": {}, "attention": {}, "routers": {}, "norms": {}, "depth": [], "dropout": {}}
    return {"loss": 2.3, "narrow": False, **empty, **values}


@each_row(
    ("first", "second", "fires"),
    [
        ([64, 20], [64, 64], True),
        ([8, 64], [64, 8], False),  # a factorisation: 64 -> 8 -> 64
        ([16, 8, 3, 3], [16, 16, 3, 3], True),
        ([16, 8, 1, 3], [16, 16, 3, 1], False),  # a kernel in two factors
    ],
)
def test_two_linear_layers_in_a_row(first: list[int], second: list[int], fires: bool) -> None:
    chain = {"first": "a.weight", "second": "b.weight", "of": [first, second]}
    tried = (1, "activation_between", {"as_it_was": 0.4, "activated": 0.01})
    assert bool(codes(structure.missing_nonlinearity, (1, "structure", {"chains": [chain]}), tried)) == fires


@each_row(
    ("was", "activated", "severity"),
    [(0.4, 0.01, "warning"), (0.4, 0.39, "info"), (1e-3, 1e-5, "info"), (None, None, "info")],
)
def test_linear_layers_in_a_row_that_lose_nothing_are_an_info(
    was: float | None, activated: float | None, severity: str
) -> None:
    chain = {"first": "a.weight", "second": "b.weight", "of": [[64, 20], [64, 64]]}
    tried = (1, "activation_between", {"as_it_was": was, "activated": activated} if was else {"blind": "no replay"})
    [found] = said(structure.missing_nonlinearity, (1, "structure", {"chains": [chain]}), tried)
    assert isinstance(found, Finding) and found.found.severity == severity


def test_mixed_samples_need_a_view_or_a_batch() -> None:
    moved = {"asked": True, "size": 32, "is_batch": False, "changed": 0, "own": 3.0, "others": 1.0, "samples": 7}
    shuffle = {"module": "", "from": [32, 16, 8], "to": [16, 32, 8]}
    assert codes(structure.mixes_samples, (1, "isolation", moved)) == []  # nodes of a graph, or time steps
    assert codes(structure.mixes_samples, (1, "isolation", moved | {"is_batch": True})) == ["model.mixes_samples"]
    seen = (1, "structure", {"shuffles": [shuffle]})
    assert codes(structure.mixes_samples, seen, (1, "isolation", moved)) == ["model.mixes_samples"]
    assert codes(structure.mixes_samples, seen, (1, "isolation", moved | {"others": 0.0})) == []


@each_row(
    ("told", "fires"),
    [
        ({}, True),
        ({"error": 1e-7}, False),
        ({"constant": True}, False),  # straight through a rounding
        ({"identity": True, "factor": -1.0}, False),  # gradient reversal
        ({"own_way": True}, False),  # feedback alignment
        ({"unsteady": 0.5}, False),  # a quotient that depends on its width
    ],
)
def test_a_backward_that_is_no_derivative(told: dict[str, Any], fires: bool) -> None:
    custom = (1, "structure", {"custom": ["Swish"]})
    assert said(structure.wrong_backward, custom) == [ExperimentRequest("custom_functions", 1)]
    one = {"function": "Swish", "module": "1", "error": 0.5, "factor": 2.0, "unsteady": 0.0}
    one |= {"identity": False, "constant": False} | told
    found = codes(structure.wrong_backward, custom, (1, "custom_functions", {"functions": [one]}))
    assert found == (["gradient.wrong_backward"] if fires else [])


def test_too_large_needs_normal_inputs_and_a_remedy_that_works() -> None:
    told = {"loss": 20.0, "classes": [33], "input_size": 1.0, "large": {"head.weight": 8.0}, "rescaled": 3.6}
    assert codes(structure.too_large, (1, "initial", told)) == ["model.init_too_large"]
    assert codes(structure.too_large, (1, "initial", told | {"input_size": 255.0})) == []
    assert codes(structure.too_large, (1, "initial", told | {"rescaled": 18.0})) == []


def test_a_new_head_alone_is_a_fine_tune() -> None:
    gone = {"weights": 8, "gone": ["head.weight"], "share": 0.1}
    assert codes(structure.reinitialised, (1, "loaded", gone)) == []
    assert codes(structure.reinitialised, (1, "loaded", gone | {"share": 1.0})) == ["checkpoint.loaded_weights_overwritten"]


def test_gradients_that_fall_with_the_depth() -> None:
    slope = [[str(n), 10.0 ** (n - 12)] for n in range(12)]
    assert codes(layers.vanishing, (1, "layers", look(depth=slope))) == ["gradient.vanishing"]
    overfitted = [[name, 1e-12] for name, _ in slope]
    assert codes(layers.vanishing, (1, "layers", look(depth=overfitted))) == []
    narrow = (1, "layers", look(depth=slope, narrow=True))
    assert said(layers.vanishing, narrow) == [ExperimentRequest("depth_in_fp32", 1)]
    assert codes(layers.vanishing, narrow, (1, "depth_in_fp32", {"depth": [[n, 1.0] for n, _ in slope]})) == []


def test_dead_units() -> None:
    dead = {"units": 64, "dead": 1.0, "never": 1.0, "varies": 1.0, "rows": 64, "furthest": -10.0}
    assert codes(layers.dead_relu, (1, "layers", look(relus={"1": dead}))) == ["model.dead_relu"]
    sparse = dead | {"dead": 0.0, "never": 0.9}
    constant = dead | {"varies": 0.0}  # the input is at fault
    for healthy in (sparse, constant):
        assert codes(layers.dead_relu, (1, "layers", look(relus={"1": healthy}))) == []


@each_row(
    ("share", "falls", "severity"),
    [(0.5, True, "info"), (0.5, False, "warning"), (0.95, True, "warning")],
)
def test_units_that_died_while_the_others_learn(share: float, falls: bool, severity: str) -> None:
    alive = {"dead": 0.0, "varies": 1.0, "rows": 64, "furthest": -1.0}
    seen = [(16, alive), (32, alive | {"dead": share})]
    looks = [Examined(time_s=0.0, step=n, experiment="layers", values=look(relus={"1": each})) for n, each in seen]
    losses = [2.0 + 0.1 * (n % 3) - (n / 30 if falls else 0.0) for n in range(33)]
    steps = [Watched(time_s=0.0, step=n, loss=loss, grad_norm=1.0, lr=0.1) for n, loss in enumerate(losses)]
    [found] = [each for each in layers.dead_relu(Case([*steps, *looks])) if isinstance(each, Finding)]
    assert found.found.severity == severity


def test_a_short_last_batch_is_no_tiny_batch() -> None:
    tiny = look(norms={"bn": {"samples": 2, "values": 2, "calls": 1, "again": 0}})
    large = look(norms={"bn": {"samples": 64, "values": 64, "calls": 1, "again": 0}})
    assert codes(layers.bn_tiny_batch, (1, "layers", tiny), (2, "layers", tiny)) == ["model.bn_tiny_batch"]
    assert codes(layers.bn_tiny_batch, (1, "layers", large), (2, "layers", tiny)) == []


@each_row(("values", "severity"), [(2, "warning"), (256, "info")])
def test_one_picture_has_many_values(values: int, severity: str) -> None:
    tiny = look(norms={"bn": {"samples": 1, "values": values, "calls": 1, "again": 0}})
    looks = [Examined(time_s=0.0, step=n, experiment="layers", values=tiny) for n in (1, 2)]
    assert [each.found.severity for each in layers.bn_tiny_batch(Case(looks)) if isinstance(each, Finding)] == [
        severity
    ]


@each_row(("calls", "again", "momentum", "fires"), [(1, 1, 0.1, 1), (2, 0, 0.1, 0), (1, 1, 0.0513, 0)])
def test_statistics_that_are_moved_twice(calls: int, again: int, momentum: float, fires: int) -> None:
    seen = {"samples": 64, "values": 64, "calls": calls, "again": again, "updates": 2, "momentum": momentum}
    assert len(codes(layers.bn_double_update, (1, "layers", look(norms={"bn": seen})))) == fires


def test_a_load_that_is_uneven_from_the_start_is_no_collapse() -> None:
    def way(*effective: float) -> list[tuple[int, str, dict[str, Any]]]:
        routers = [{"r": {"experts": 8, "effective": each, "most": 0.5}} for each in effective]
        return [(n + 1, "layers", look(routers=each)) for n, each in enumerate(routers)]

    assert codes(layers.router_collapse, *way(7.0, 6.0, 4.0, 2.0, 1.5, 1.2)) == ["model.router_collapse"]
    assert codes(layers.router_collapse, *way(3.5, 3.6, 3.4, 3.5, 3.6, 3.5)) == []


def test_scores_that_grow_and_grow() -> None:
    def way(*highest: float) -> list[tuple[int, str, dict[str, Any]]]:
        seen = [{"a": {"highest": each, "spread": 2.0, "evenness": 0.5}} for each in highest]
        return [(n + 1, "layers", look(attention=each)) for n, each in enumerate(seen)]

    assert codes(layers.attention_logit_growth, *way(10, 40, 200, 500)) == ["model.attention_logit_growth"]
    assert codes(layers.attention_logit_growth, *way(2, 4, 8, 12)) == []


def test_strong_dropout_is_asked_what_it_costs() -> None:
    seen = (16, "layers", look(dropout={"4": 0.9}))
    assert said(layers.excess_dropout, (1, *seen[1:])) == []  # nothing is learned yet
    assert said(layers.excess_dropout, seen) == [ExperimentRequest("dropout_gap", 16)]
    assert codes(layers.excess_dropout, seen, (16, "dropout_gap", {"with": 2.0, "without": 1.99})) == []
    assert codes(layers.excess_dropout, seen, (16, "dropout_gap", {"with": 2.0, "without": 1.5})) == [
        "model.excess_dropout"
    ]
