"""Findings as a person reads them: each in at most six lines, notes only on request."""

from __future__ import annotations

from pathlib import Path

from trainwright.report.findings import lines_of
from trainwright.runs.records import Evidence, Found, Tried, Where


def found(code: str, severity: str) -> Found:
    return Found(
        time_s=0.0,
        code=code,
        severity=severity,
        step=9,
        symptom="every prediction is compared with every target",
        cause="shapes [16, 1] and [16] broadcast to [16, 16]",
        remedy="squeeze the prediction",
        sure=0.9,
        since_step=1,
        where=Where(source="train.py:12", op="mse_loss"),
        evidence=tuple(Evidence(measure=f"shape {n}", seen=n, expected=0) for n in range(5)),
        tried=(Tried(remedy="same shape", result="loss 2.1 -> 1.4 in 8 updates"),),
        consequences=("optim.lr_too_low: nothing moves",),
    )


def test_a_finding_has_at_most_six_lines() -> None:
    lines = lines_of([found("loss.broadcast_target", "critical")])
    assert lines == [
        "diagnosis: 1 finding, the first cause first",
        "1. critical: loss.broadcast_target in op mse_loss at train.py:12 (step 9, since step 1)",
        "   every prediction is compared with every target; explains optim.lr_too_low",
        "   seen: shape 0 0 (expected 0); shape 1 1 (expected 0); shape 2 2 (expected 0)",
        "   cause: shapes [16, 1] and [16] broadcast to [16, 16]",
        "   fix: squeeze the prediction",
        "   tried: same shape: loss 2.1 -> 1.4 in 8 updates",
    ]


def test_notes_are_printed_on_request_alone() -> None:
    several = [found("loss.broadcast_target", "warning"), found("gradient.spike", "info")]
    lines = lines_of(several, Path("runs/a"))
    assert lines[0] == "diagnosis: 1 finding, the first cause first"
    assert lines[-2:] == [
        "1 note below a warning: trainwright diagnose runs/a -v",
        "more: trainwright explain loss.broadcast_target; trainwright diagnose runs/a",
    ]
    assert sum("gradient.spike" in line for line in lines_of(several, verbose=True)) == 1
    assert lines_of(several[1:])[0] == "diagnosis: nothing found"
