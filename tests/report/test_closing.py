"""The last lines of a run: the verdict, where it is, what it reached, and always the next command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainwright.runs.printing import figure
from trainwright.runs.records import Ended, Evaluated, RunVerdict
from trainwright.training.result import closing

VERDICT = RunVerdict(word="no finding", sentence="finished without a finding: training loss 3.000 -> 1.500")
ENDED = Ended(
    time_s=0.0,
    ending="finished",
    reason="",
    step=100,
    loss=1.5,
    val_loss=1.4,
    skipped=0,
    seconds=10.0,
    verdict=VERDICT,
)
SEEN = Evaluated(time_s=0.0, step=100, loss=1.4, weight=10.0, metrics={"accuracy": 0.5}, seconds=1.0)


def lines_of(ended: Ended) -> list[str]:
    again, longer = "trainwright resume runs/x", "--set until=200steps"
    return closing(ended, Path("runs/x"), SEEN, saved=True, again=again, longer=longer)


def test_a_run_that_finished() -> None:
    assert lines_of(ENDED) == [
        "verdict: finished without a finding: training loss 3.000 -> 1.500",
        "run      runs/x",
        "reached  step 100, training loss of the last step 1.500, validation loss 1.400, accuracy 0.5",
        "next     trainwright resume runs/x --set until=200steps   # trains it further",
    ]


def test_a_stopped_run_goes_on() -> None:
    lines = lines_of(replace(ENDED, ending="stopped", reason="SIGTERM"))
    assert lines[-1] == "next     trainwright resume runs/x   # continues from the newest checkpoint"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.9, "2.900"),
        (0.0012345, "0.001234"),
        (1.2345e-5, "1.234e-05"),
        (1000.0, "1000"),
        (123456.0, "1.235e+05"),
        (-3.14159, "-3.142"),
        (float("nan"), "not finite"),
    ],
)
def test_a_loss_has_four_significant_digits(value: float, text: str) -> None:
    assert figure(value) == text
