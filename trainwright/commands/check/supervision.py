"""Verdicts on what a data set supervises."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainwright.commands.check.verdict import Verdict, Word
from trainwright.runs.supervision import Severity, Supervision

WORDS: dict[Severity, Word] = {"error": "fail", "warning": "warn", "note": "ok"}
CODES = {
    "shifted_twice": "data.labels_shifted_twice",
    "trained_padding": "data.pad_in_loss",
    "leaked": "data.train_val_overlap",
    "nearly_leaked": "data.train_val_overlap",
}
"""Findings that have a page of ``trainwright explain``."""


def supervised(audits: Sequence[Supervision]) -> Iterator[Verdict]:
    """Yield the audits: numbers, findings, and decoded samples with marks around what carries loss."""
    for audit in audits:
        what = "supervision" if audit.data == "train" else f"supervision of {audit.data}"
        if audit.refusal is None:
            yield Verdict("ok", what, "; ".join(filter(None, [audit.summary(), audit.shares()])))
        for finding in audit.findings:
            code = CODES.get(finding.name, "")
            yield Verdict(WORDS[finding.severity], what, finding.message, finding.remedy, code)
        for sample in audit.decoded:
            yield Verdict("ok", what, f"{sample.place}: {sample.line()}")
