"""Checks of the loss on records made by hand: each on its mechanism, and silent on its look-alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tests.rows import each_row
from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding
from trainwright.doctor.loss.names import scores
from trainwright.runlog.records import Examined, Watched

Check = Callable[[Case], Iterable[Finding | ExperimentRequest]]


def exam(name: str, step: int = 1, **values: Any) -> Examined:
    return Examined(time_s=0.0, step=step, experiment=name, values=values)


def about_loss(*given: dict[str, Any], step: int = 1, **more: Any) -> Examined:
    """The exam of a step; every loss in it is asked to get smaller unless it says otherwise."""
    usual = {"shape": [64, 10], "module": "", "wants": 1, "value": 2.3}
    values = {"outer": [], "drawn": False, "terms": 1, "rivals": False, "tokens": False, "fed": True, "reached": 6}
    return exam("loss", step, given=[usual | each for each in given], **values | more)


def codes(check: Check, *records: Examined | Watched, finished: bool = False) -> list[str]:
    """What a check says: codes, and the names of the experiments that it wishes for."""
    said = check(Case(records, finished=finished))
    return [each.experiment if isinstance(each, ExperimentRequest) else each.found.code for each in said]


CE = {"op": "cross_entropy"}


@each_row(
    ("given", "check", "code"),
    [
        (CE | {"simplex": True}, scores.softmax_before_ce, "loss.softmax_before_ce"),
        ({"op": "log_softmax", "simplex": True}, scores.softmax_before_ce, "loss.softmax_before_ce"),
        (
            {"op": "binary_cross_entropy_with_logits", "squashed": True},
            scores.softmax_before_ce,
            "loss.softmax_before_ce",
        ),
        ({"op": "softmax", "simplex": True, "made_in": "moe"}, scores.softmax_twice, "loss.softmax_twice"),
        ({"op": "nll_loss", "simplex": True, "above_0": 1.0}, scores.nll_on_probs, "loss.nll_on_probs"),
        ({"op": "nll_loss", "simplex": False, "above_0": 0.5}, scores.nll_on_probs, "loss.nll_on_probs"),
    ],
)
def test_what_a_loss_is_given(given: dict[str, Any], check: Check, code: str) -> None:
    assert codes(check, about_loss(given)) == [code]


@each_row("check", [scores.softmax_before_ce, scores.softmax_twice, scores.nll_on_probs])
def test_logits_and_log_probabilities_are_all_right(check: Check) -> None:
    log_probs = {"op": "nll_loss", "simplex": False, "above_0": 0.0}
    assert codes(check, about_loss(CE | {"simplex": False}, log_probs)) == []


def test_a_square_of_terms() -> None:
    outer = {"op": "sub", "shapes": [[64, 1], [64]], "terms": 4096, "samples": 64}
    assert codes(scores.broadcast_target, about_loss(outer=[outer])) == ["loss.broadcast_target"]
    assert codes(scores.broadcast_target, about_loss()) == []


RISES = {"as_it_was": [2.3, 2.4], "tenth": [2.3, 2.31], "turned": [2.3, 2.29]}


def test_a_loss_that_is_maximised() -> None:
    uphill = about_loss(CE | {"wants": -1})
    assert codes(scores.wrong_sign, uphill) == ["sign"]
    assert codes(scores.wrong_sign, uphill, exam("sign", **RISES)) == ["loss.wrong_sign"]


@each_row(
    "records",
    [
        [about_loss(CE)],
        [about_loss(CE | {"wants": -1}, CE)],  # one is unlearned, another learned
        [about_loss(CE | {"wants": -1}), about_loss(CE, step=2)],
        [about_loss(CE | {"wants": -1}, drawn=True)],  # a policy, punished for what it drew
        [about_loss(CE | {"wants": -1}, rivals=True)],  # a generator against its critic
    ],
)
def test_a_loss_that_may_be_maximised(records: list[Examined]) -> None:
    assert codes(scores.wrong_sign, *records, exam("sign", **RISES)) == []


def test_a_rate_that_is_too_high_is_no_wrong_sign() -> None:
    too_high = {"as_it_was": [2.3, 9.0], "tenth": [2.3, 2.2], "turned": [2.3, 2.4]}
    assert codes(scores.wrong_sign, about_loss(CE | {"wants": -1}), exam("sign", **too_high)) == []


def step(*events: tuple[str, Any], reached: int = 0, **values: Any) -> Watched:
    values = {"grads": [reached, 6], **values}
    return Watched(time_s=0.0, step=1, loss=2.3, grad_norm=0.0, lr=0.1, events=list(events), values=values)


BACKWARD = ("backward", {"cut": False})


def test_a_loss_without_a_graph() -> None:
    code = ["grad.graph_cut_at_loss"]
    assert codes(scores.graph_cut_at_loss, step(("backward", {"cut": True}))) == code
    assert codes(scores.graph_cut_at_loss, step(BACKWARD), about_loss(CE, reached=0)) == code
    blind = "the loss is not made of what the watched model returned"
    assert codes(scores.graph_cut_at_loss, step(BACKWARD, blind=blind)) == code


def test_a_batch_without_a_graph_among_others_is_an_info() -> None:
    def at(n: int, reached: int) -> Watched:
        graph = {"cut": not reached}
        return Watched(
            time_s=0.0,
            step=n,
            loss=1.0,
            grad_norm=1.0,
            lr=0.1,
            events=[("backward", graph)],
            values={"grads": (reached, 6)},
        )

    def found(*reached: int) -> list[str]:
        case = Case([at(n, each) for n, each in enumerate(reached, 1)])
        return [each.found.severity for each in scores.graph_cut_at_loss(case) if isinstance(each, Finding)]

    assert found(6, 0) == [], "the next steps tell"
    assert found(6, 0, 6) == ["info"]
    assert found(6, 0, 0, 0) == found(0) == ["critical"]


def test_gradients_that_are_dropped_or_elsewhere_are_no_cut() -> None:
    assert codes(scores.graph_cut_at_loss, step(("backward", {"cut": True}), ("zero_grad", 0))) == []
    assert codes(scores.graph_cut_at_loss, step(BACKWARD), about_loss(CE, reached=6)) == []


def terms(large: float, small: float, own: float = 1.0, at: int = 1) -> Examined:
    each = [
        {"name": "mse_loss", "weight": 1e4, "own": 1e4, "value": 1.0, "slot": 3, "norm": large, "shared": large},
        {"name": "cross_entropy", "weight": own, "own": own, "value": 2.3, "slot": 2, "norm": small, "shared": small},
    ]
    return exam("terms", at, terms=each, shared=4)


def test_a_term_that_dominates() -> None:
    several = about_loss(CE, terms=2)
    assert codes(scores.term_dominates, several) == ["terms"]
    assert codes(scores.term_dominates, several, terms(5e3, 1.0)) == ["terms"]
    assert codes(scores.term_dominates, several, terms(5e3, 1.0), terms(5e3, 1.0, at=2)) == ["loss.term_dominates"]


@each_row("norms", [(500.0, 1.0, 1.0), (5e3, 1.0, 1e-3)])
def test_a_small_penalty_is_not_dominated(norms: tuple[float, float, float]) -> None:
    assert codes(scores.term_dominates, about_loss(CE, terms=2), terms(*norms), terms(*norms, at=2)) == []
