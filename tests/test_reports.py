"""Faults from public reports: each is declared in full, and some open ones show their symptom.

All of them: ``python -m zoo.reports --watch null --twins --half both``.
"""

from __future__ import annotations

import re

import pytest

from zoo.reports.case import HALVES, STAGES, Case, Outcome, Place, load
from zoo.reports.judge import is_at, is_named, judge
from zoo.reports.run import run_apart, run_here
from zoo.reports.watches import Alarm, NullWatch

CASES = [case for half in HALVES for case in load(half)]
BY_ID = {case.id: case for case in CASES}
RUN = ["sorted_classes", "metric_not_reset", "optimizer_of_old_model"]
PUBLIC = re.compile(r"https://\S+|[\w.-]+/[\w.-]+#\d+|arXiv:\d{4}\.\d{5}")


def test_ids_are_unique() -> None:
    ids = [case.id for case in CASES]
    assert len(ids) == len(set(ids))


def test_no_two_faults_come_from_the_same_report() -> None:
    sources = [source for case in CASES if case.is_fault for source in case.sources]
    assert len(sources) == len(set(sources))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_case_is_declared_in_full(case: Case) -> None:
    assert case.title and case.half in HALVES
    assert case.sources and all(PUBLIC.fullmatch(source) for source in case.sources)
    assert bool(case.diagnosis) == case.is_fault
    assert case.stage in (STAGES if case.is_fault else (None,))
    assert 0 <= case.onset <= case.shows
    assert not is_named(case.diagnosis, alarm())
    lines = case.file.read_text().splitlines()
    for place in case.where:
        assert place.line is None or any(re.search(place.line, line) for line in lines), place.line


def alarm(step: int = 1, severity: str = "critical", cause: str = "") -> Alarm:
    return Alarm("loss.broadcast", severity, step, "", cause, op="mse_loss", module="encoder")


@pytest.mark.parametrize(
    ("cause", "named"),
    [
        ("two steps without zero_grad(): gradients add up", True),
        ("zero_grad() comes after backward()", False),
        ("nonzero gradients", False),
    ],
)
def test_a_diagnosis_is_named_by_all_parts_of_a_pattern(cause: str, named: bool) -> None:
    assert is_named(["zero & grad & !after backward"], alarm(cause=cause)) is named


@pytest.mark.parametrize(
    ("place", "right"),
    [
        (Place(op="mse"), True),
        (Place(op="mse", module="head"), False),
        (Place(line="mse_loss"), False),
    ],
)
def test_a_place_is_right_if_each_of_its_fields_matches(place: Place, right: bool) -> None:
    assert is_at(place, alarm(), BY_ID["vae_reduction"].file) is right


def test_the_line_of_a_place_is_looked_up_in_the_program() -> None:
    case = BY_ID["vae_reduction"]
    number = next(n for n, line in enumerate(case.file.read_text().splitlines(), 1) if "binary_cross_entropy(" in line)
    found = Alarm("loss.scale", "warning", 1, "", "", source=f"{case.file.name}:{number}")
    assert is_at(Place(line="binary_cross_entropy"), found, case.file)
    assert not is_at(Place(line="binary_cross_entropy"), found, case.file.with_name("other.py"))


@pytest.mark.parametrize(
    ("step", "severity", "detected", "in_time"),
    [
        (59, "warning", False, False),
        (61, "info", False, False),
        (61, "warning", True, True),
        (300, "critical", True, False),
    ],
    ids=["before the onset", "no alarm", "in time", "late"],
)
def test_an_alarm_counts_from_the_onset(step: int, severity: str, detected: bool, in_time: bool) -> None:
    case = BY_ID["stays_in_eval"]
    verdict = judge(case, Outcome([], True, {}), [alarm(step, severity)], faulty=True)
    assert (verdict.detected, verdict.in_time) == (detected, in_time)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_a_symptom_is_in_the_fault_and_not_in_its_twin(name: str) -> None:
    faulty, _ = run_here(BY_ID[name], NullWatch(), 0, faulty=True)
    assert faulty.symptom, faulty.numbers
    repaired, _ = run_here(BY_ID[name], NullWatch(), 0, faulty=False)
    assert repaired.is_healthy, repaired.numbers


@pytest.mark.process
@pytest.mark.slow
def test_a_program_of_two_ranks_shows_its_symptom() -> None:
    row = run_apart(BY_ID["plateau_per_rank"], "null", 0, faulty=True)
    assert row.error is None and row.as_expected, row
