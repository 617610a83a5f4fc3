"""The last words of a run: honest about trouble, and always the next command."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from tests.rows import each_row
from trainwright.doctor.finding import Severity, finding
from trainwright.report.text import Ending, closing
from trainwright.runlog.records import Ended, Evaluated, Found

ENDED = Ended(time_s=0.0, ending="finished", reason="", step=100, loss=1.5, val_loss=1.4, skipped=0, seconds=10.0)
SEEN = Evaluated(time_s=0.0, step=100, loss=1.4, weight=10.0, metrics={"accuracy": 0.5}, seconds=1.0)
HEALTHY = Ending(
    ENDED,
    Path("runs/x"),
    0.1,
    SEEN,
    saved=True,
    marks={"uniform": 4.6, "bigram": 2.46},
    again="trainwright resume runs/x",
    longer="--set until=200steps",
)


def found(severity: Severity) -> Found:
    return finding("loss.wrong_sign", severity, 1, symptom="", cause="", remedy="", sure=1.0).found


def test_a_healthy_run() -> None:
    assert closing(HEALTHY) == [
        "verdict: finished and healthy: no update skipped, every value finite; "
        "the loss is 1.06 below what a bigram table reaches (2.46)",
        "run      runs/x",
        "reached  step 100, training loss 1.5000, validation loss 1.4000, accuracy 0.5",
        "next     trainwright resume runs/x --set until=200steps   # trains it further",
    ]


@each_row(
    ("change", "said"),
    [
        ({"ended": replace(ENDED, val_loss=math.nan)}, "the loss is not finite"),
        ({"ended": replace(ENDED, skipped=3)}, "3 of 100 updates were skipped"),
        ({"wait_share": 0.5, "wait_s": 0.1}, "50% of the time went into waiting for data"),
        ({"wait_share": 0.5, "wait_s": 0.1, "reads_faster": "sort it"}, "waiting for data (sort it)"),
        ({"saved": False}, "the last state could not be saved"),
        ({"findings": [found("critical")]}, "finished, but the doctor found loss.wrong_sign (critical)"),
        ({"findings": [found("info"), found("warning")]}, "finished, but the doctor found loss.wrong_sign (warning)"),
    ],
)
def test_trouble_is_said_instead_of_health(change: dict[str, object], said: str) -> None:
    verdict = closing(replace(HEALTHY, **change))[0]  # type: ignore[arg-type]
    assert said in verdict and "healthy" not in verdict


def test_a_wait_that_no_worker_would_shorten_is_no_trouble() -> None:
    assert "finished and healthy" in closing(replace(HEALTHY, wait_share=0.5, wait_s=2e-4))[0]


def test_an_info_is_no_trouble() -> None:
    assert "finished and healthy" in closing(replace(HEALTHY, findings=[found("info")]))[0]


def test_a_stopped_run_goes_on() -> None:
    lines = closing(replace(HEALTHY, ended=replace(ENDED, ending="stopped", reason="SIGTERM")))
    assert lines[0].startswith("verdict: stopped by SIGTERM after healthy steps: no update skipped")
    assert lines[-1] == "next     trainwright resume runs/x   # goes on from the newest checkpoint"
