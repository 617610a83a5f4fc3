"""One list of findings: what a writer puts into the log, a fold of the log gives back."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from trainwright.runs.findings import FindingsFold, FindingsWriter, findings_in, rank
from trainwright.runs.records import Evidence, Found, Record, Started, Withdrawn


def found(code: str, severity: str = "warning", **more: object) -> Found:
    made = Found(time_s=1.0, code=code, severity=severity, step=3, symptom="", cause="", remedy="", sure=0.9)
    return replace(made, **more)  # type: ignore[arg-type]


def test_the_log_has_the_latest_wording_and_what_was_withdrawn() -> None:
    log: list[Record] = []
    writer = FindingsWriter(log.append)
    writer.update([found("a", symptom="in 3 steps"), found("b")], 3)
    writer.update([found("a", symptom="in 8 steps"), found("b")], 8)
    assert findings_in(log) == writer.findings
    assert [each.symptom for each in findings_in(log)] == ["in 8 steps", ""]
    writer.update([found("a", symptom="in 8 steps", consequences=("b: it follows",))], 9)
    assert findings_in(log) == writer.findings and [each.code for each in writer.findings] == ["a"]
    assert [type(each) for each in log] == [Found, Found, Found, Withdrawn, Found]
    writer.update([found("a", symptom="in 8 steps", consequences=("b: it follows",)), found("b")], 12)
    assert [each.code for each in findings_in(log)] == ["a", "b"], "it may come back"


def test_what_did_not_change_is_not_written_again() -> None:
    log: list[Record] = []
    writer = FindingsWriter(log.append)
    for step in range(4):
        evidence = (Evidence(measure="the loss", seen=float("nan"), expected=math.inf),)
        writer.update([found("a", evidence=evidence)], step)
    assert len(log) == 1


def test_a_process_that_starts_has_no_findings_yet() -> None:
    fold = FindingsFold()
    for record in (found("a"), Started(time_s=2.0, step=0, version="0", pid=1)):
        fold.take(record)
    assert fold.findings == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (found("z", "critical", sure=0.1), found("a", "warning", sure=1.0)),
        (found("z"), found("a", sure=1.0, names_cause=False)),
        (found("z", sure=0.9), found("a", sure=0.5)),
        (found("z", stage="input"), found("a", stage="update")),
        (found("z", stage="loop"), found("a")),
        (found("z", "info"), found("a", "of another version")),
    ],
)
def test_the_first_cause_comes_first(first: Found, second: Found) -> None:
    assert sorted([second, first], key=rank) == [first, second]
    assert findings_in([second, first]) == [first, second]
