"""Every law is written down, has a page, and is judged: held, broken, or why nothing can be said."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.rows import each_row
from trainwright.doctor import FAMILIES
from trainwright.doctor.case import Case
from trainwright.doctor.diagnose import LAWS, diagnose
from trainwright.doctor.finding import Finding, finding
from trainwright.doctor.law import Holds, Law, NotApplicable, Verdict
from trainwright.doctor.pages import LAW_SECTIONS, law_codes, page, title
from trainwright.runlog.records import Where


def test_every_law_has_its_page_in_the_order_of_its_family() -> None:
    assert sorted(law.code for law in LAWS) == sorted(law_codes())
    for family in FAMILIES:
        written = re.findall(r"^## (\S+)$", (family.folder / "laws.md").read_text(), flags=re.MULTILINE)
        assert [f"{family.name}.{each}" for each in written] == [law.name for law in family.laws]


def test_every_page_of_a_law_is_whole() -> None:
    sections = {code: re.findall(r"^\*\*(.+?)\.\*\* \S", page(code), flags=re.MULTILINE) for code in law_codes()}
    assert {code: found for code, found in sections.items() if found != list(LAW_SECTIONS)} == {}
    assert [code for code in law_codes() if not 20 <= len(title(code)) <= 250 or not title(code).endswith(".")] == []


def test_a_law_of_which_nothing_was_measured_is_not_called_held() -> None:
    states = {state.name: state.state for state in diagnose(Case([])).laws}
    assert set(states) == {law.name for law in LAWS}
    assert set(states.values()) <= {"not looked at", "not applicable"}


def broken(severity: str = "warning") -> Finding:
    return finding(
        "law.test.it_holds",
        severity,  # type: ignore[arg-type]
        3,
        symptom="3 is not 2",
        cause="something",
        remedy="another thing",
        sure=0.9,
        where=Where(module="inner"),
    )


def verdicts(*results: Verdict, named_by: tuple[str, ...] = ()) -> Law:
    def judge(case: Case) -> Iterator[Verdict]:
        yield from results

    return Law("test.it_holds", judge, named_by=named_by)


@each_row(
    ("results", "state", "why"),
    [
        ((), "not looked at", "nothing was measured for it"),
        ((Holds("12 tensors"),), "held", "12 tensors"),
        ((NotApplicable("no dropout"),), "not applicable", "no dropout"),
        ((broken(),), "broken", "3 is not 2"),
    ],
)
def test_the_state_of_a_law_says_why(results: tuple[Verdict, ...], state: str, why: str) -> None:
    [law] = diagnose(Case([]), [verdicts(*results)]).laws
    assert (law.state, law.why) == (state, why)


def test_a_law_that_raises_is_told_and_is_not_broken() -> None:
    def judge(case: Case) -> Iterator[Verdict]:
        yield Holds(str(1 / 0))

    diagnosis = diagnose(Case([]), [Law("test.it_holds", judge)])
    assert diagnosis.laws[0].state == "not looked at"
    assert [each.found.code for each in diagnosis.findings] == ["doctor.failed"]


@pytest.mark.parametrize("severity", ["warning", "critical"])
def test_a_name_takes_in_the_break_of_its_law_and_is_as_severe(severity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def name(case: Case) -> Iterator[Finding]:
        yield finding("opt.known", "warning", 3, symptom="known", cause="this", remedy="that", sure=0.6)

    monkeypatch.setattr("trainwright.doctor.diagnose.NAMES", [name])
    [found] = diagnose(Case([]), [verdicts(broken(severity), named_by=("opt.*",))]).findings
    assert (found.found.code, found.found.severity) == ("opt.known", severity)
    assert found.found.where.module == "inner", "the law knows where"
    assert found.found.consequences == ("law.test.it_holds: 3 is not 2",)
    alone = diagnose(Case([]), [verdicts(broken("warning"))]).findings
    assert [each.found.code for each in alone] == ["opt.known", "law.test.it_holds"], "what has a name comes first"
