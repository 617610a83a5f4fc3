"""Where a finding points when the recorder saw which line of the user's source made each call."""

from __future__ import annotations

from typing import Any

from tests.rows import each_row
from trainwright.doctor.call_lines import CALLS, calls_at, line_for
from trainwright.doctor.case import Case
from trainwright.doctor.diagnose import diagnose
from trainwright.doctor.pages import codes
from trainwright.runlog.records import Examined, Record, Watched, from_json, to_json

USUAL = [
    ["zero_grad", "a.py:1"],
    ["backward", "a.py:2"],
    ["clip", "a.py:3"],
    ["step", "a.py:4"],
    ["schedule", "a.py:5"],
]


def step(number: int, *kinds: str, **values: Any) -> Watched:
    usual: dict[str, Any] = {"step": {"optimizer": 0, "autocast": False}, "zero_grad": 0}
    events = [(kind, usual.get(kind, {})) for kind in kinds]
    return Watched(time_s=0.0, step=number, loss=2.3, grad_norm=0.0, lr=0.1, events=events, values=values)


@each_row(
    ("code", "line"),
    [
        ("optim.missing_zero_grad", "a.py:2"),
        ("gradient.clip_before_unscale", "a.py:3"),
        ("optim.stepped_twice", "a.py:4"),
        ("schedule.unit_mismatch", "a.py:5"),
        ("optim.zero_grad_before_step", None),  # the one zero_grad comes before backward
        ("loss.wrong_sign", None),  # no single call is at fault
        ("no.such_code", None),
    ],
)
def test_the_call_that_a_code_is_about(code: str, line: str | None) -> None:
    assert line_for(code, USUAL) == line


def test_of_several_zero_grads_the_one_that_drops_gradients() -> None:
    before = ["zero_grad", "a.py:1"]
    micro, dropping = ["backward", "a.py:2"], ["zero_grad", "a.py:3"]
    update = ["step", "a.py:4"]
    assert line_for("optim.zero_grad_before_step", [before, micro, dropping, update]) == "a.py:3"
    assert line_for("gradient.accumulation_discarded", [before, micro, dropping, update]) is None
    assert (
        line_for("gradient.accumulation_discarded", [before, micro, dropping, micro, dropping, micro, update])
        == "a.py:3"
    )
    assert line_for("gradient.accumulation_discarded", [micro, update, dropping, micro, update, dropping]) is None


def test_two_lines_that_make_the_same_call_are_no_answer() -> None:
    assert line_for("optim.missing_zero_grad", [*USUAL, ["backward", "a.py:9"]]) is None
    assert line_for("optim.missing_zero_grad", [*USUAL, *USUAL]) == "a.py:2"


def test_lines_are_those_of_the_step_or_of_the_nearest_record_that_has_them() -> None:
    early, late = [["backward", "a.py:2"]], [["backward", "a.py:8"]]
    records = [step(3, lines=early), step(4), step(5), step(8, lines=late), step(9)]
    found = {at: calls_at(Case(records), at) for at in (1, 3, 5, 8, 20)}
    assert found == {1: early, 3: early, 5: early, 8: late, 20: late}
    assert calls_at(Case([step(1)]), 1) == ()


def test_a_loop_without_a_step_has_the_lines_of_what_was_not_finished() -> None:
    unfinished = Examined(time_s=0.0, step=1, experiment="unfinished", values={"lines": USUAL})
    assert calls_at(Case([unfinished]), 1) == USUAL


def test_a_diagnosis_points_at_the_call() -> None:
    kinds = ("backward", "zero_grad", "step")
    lines = [["backward", "train.py:7"], ["zero_grad", "train.py:8"], ["step", "train.py:9"]]
    seen: list[Record] = [step(1, *kinds, grads=[0, 4], lines=lines), step(2, *kinds, grads=[0, 4])]
    for records in (seen, [from_json(to_json(each)) for each in seen]):
        [finding] = diagnose(Case(records)).findings
        assert (finding.found.code, finding.found.where.source) == ("optim.zero_grad_before_step", "train.py:8")


def test_every_code_with_a_call_exists() -> None:
    assert set(CALLS) - set(codes()) == set()
