"""The names that tie the checks to the replay: whatever a check reads or asks for is made, and the other way round."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.house import files, nodes
from trainwright.doctor.precision.names import mechanisms
from trainwright.recorder import probes
from trainwright.replay import experiments, trials
from trainwright.watching import families as _families  # noqa: F401  registers all of them

ROOT = Path(__file__).parents[2] / "trainwright"
OF_THE_SESSION = {"limits", "unfinished"}
"""What a watch says of itself and of the step that was not finished."""


@cache
def checked() -> list[tuple[str, str]]:
    """The name of what is called, and its last argument that is a string, for every such call of the checks."""
    calls = (call for path in files(ROOT / "doctor") for call in nodes(path, ast.Call))
    return [(name_of(call.func), text) for call in calls for text in list(texts(call))[-1:]]


def name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def texts(call: ast.Call) -> Iterator[str]:
    for each in call.args[:2]:
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


def named(*callees: str) -> set[str]:
    return {text for callee, text in checked() if callee in callees}


def made() -> set[str]:
    names = {probe.name for probe in map(_class_of, probes.PROBES)}
    return {*experiments.EXPERIMENTS, *names, *OF_THE_SESSION}


def _class_of(probe: object) -> type[probes.Probe]:
    assert isinstance(probe, type) and issubclass(probe, probes.Probe)
    return probe


@pytest.mark.slow
def test_every_outcome_that_a_check_reads_is_made() -> None:
    read = named("outcomes", "newest", "facts", "_outcome", "_is_due")
    assert len(read) > 30
    assert read - made() == set()


@pytest.mark.slow
def test_every_experiment_that_a_check_asks_for_exists_and_is_made_only_on_request() -> None:
    requested = named("ExperimentRequest")
    assert {name for name in requested if experiments.EXPERIMENTS[name].when != "requested"} == set()


def test_every_trial_of_a_remedy_exists_and_some_finding_names_it() -> None:
    defined = [*mechanisms.WORDS.values(), *vars(mechanisms).values()]
    guards = {each.guard for each in defined if isinstance(each, mechanisms.Mechanism) and each.guard}
    assert named("RemedyTrial") | guards == set(trials.TRIALS)
