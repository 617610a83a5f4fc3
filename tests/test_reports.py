"""Faults from public reports: each is declared in full, and some open ones show their symptom.

All of them: ``python -m zoo.reports --watch null --twins --half both``.
"""

from __future__ import annotations

import re

import pytest

from zoo.reports.case import HALVES, Case, Place, load
from zoo.reports.judge import is_at, is_named
from zoo.reports.watches import Alarm

CASES = [case for half in HALVES for case in load(half)]
PUBLIC = re.compile(r"https://\S+|[\w.-]+/[\w.-]+#\d+|arXiv:\d{4}\.\d{5}")


def test_ids_are_unique() -> None:
    ids = [case.id for case in CASES]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_case_is_declared_in_full(case: Case) -> None:
    assert case.sources and all(PUBLIC.fullmatch(source) for source in case.sources)
    assert case.title and case.half in HALVES
    assert bool(case.diagnosis) == case.is_fault
    assert 0 <= case.onset <= case.shows
    for pattern in case.diagnosis:
        for part in pattern.split(" & "):
            re.compile(part.strip().removeprefix("!"))


@pytest.mark.parametrize(
    ("cause", "named"),
    [
        ("two steps without zero_grad(): gradients add up", True),
        ("zero_grad() comes after backward()", False),
        ("the learning rate is too high", False),
    ],
)
def test_a_diagnosis_is_named_by_all_parts_of_a_pattern(cause: str, named: bool) -> None:
    alarm = Alarm("optim.gradients", "warning", 3, "", cause)
    assert is_named(["zero grad & !after backward"], alarm) is named


@pytest.mark.parametrize(("place", "right"), [(Place(op="mse"), True), (Place(op="mse", module="head"), False)])
def test_a_place_is_right_if_each_of_its_fields_matches(place: Place, right: bool) -> None:
    alarm = Alarm("loss.broadcast", "critical", 1, "", "", op="mse_loss", module="encoder")
    assert is_at(place, alarm, CASES[0].file) is right if CASES else True
