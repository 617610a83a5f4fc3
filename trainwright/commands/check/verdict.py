"""The verdicts of a check, each with its remedy, and the conclusion from them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from trainwright.runs.supervision import Severity, Supervision

Word = Literal["ok", "warn", "fail", "cannot tell"]

SEVERITY: dict[Word, int] = {"ok": 0, "cannot tell": 0, "warn": 1, "fail": 2}
WOULD_NOT_TRAIN = 3
WIDTH = 118


@dataclass(frozen=True)
class Verdict:
    """The result of one check. ``fail``: the run would not train, or its results could not be trusted.

    ``code`` is the name of a page of ``trainwright explain``; "" without one.
    """

    word: Word
    what: str
    seen: str
    remedy: str = ""
    code: str = ""


@dataclass
class CheckResult:
    """The verdicts of one recipe in order. ``say`` receives the lines of each at once.

    The conclusion (``trains``, ``exit_code``, ``summary``) is computed from the verdicts and ``learns``, so it cannot
    contradict them. ``complete`` is False if an error prevented some checks. ``learns`` is True if the smoke run, or
    without enough steps of it the training on one batch, showed that the loss falls.
    """

    recipe: str
    say: Callable[[str], None] = lambda _text: None
    verdicts: list[Verdict] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = True
    learns: bool = False

    def add(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)
        for line in lines_of(verdict):
            self.say(line)

    def has(self, code: str, word: Word) -> bool:
        """Return True if a verdict with this code is at least as severe as ``word``."""
        return any(each.code == code and SEVERITY[each.word] >= SEVERITY[word] for each in self.verdicts)

    @property
    def failed(self) -> list[str]:
        return list(dict.fromkeys(each.what for each in self.verdicts if each.word == "fail"))

    @property
    def trains(self) -> bool | None:
        """True if the recipe would train; None if nothing failed and no part showed that it learns."""
        if self.failed:
            return False
        return True if self.complete and self.learns else None

    @property
    def exit_code(self) -> int:
        return WOULD_NOT_TRAIN if self.failed else 0

    def summary(self) -> str:
        count = {word: sum(each.word == word for each in self.verdicts) for word in ("ok", "warn", "fail")}
        unknown = len(self.verdicts) - sum(count.values())
        if self.trains is None:
            result = "found nothing that prevents training, but no proof that it learns"
        elif self.trains:
            result = "this would train"
        else:
            result = f"do not start this run: {first_of(self.failed)} failed"
        if count["warn"] and not count["fail"]:
            result += "; read the warnings first"
        counts = ", ".join(f"{n} {word}" for word, n in count.items() if n)
        rest = "" if self.complete else "; the rest was not checked"
        return f"{result} ({counts}{f', {unknown} cannot tell' if unknown else ''}; {self.seconds:.0f} s){rest}"

    def to_json(self) -> dict[str, object]:
        return {
            "recipe": self.recipe,
            "trains": self.trains,
            "complete": self.complete,
            "verdicts": [asdict(each) for each in self.verdicts],
            "seconds": round(self.seconds, 2),
            "exit": self.exit_code,
        }


def lines_of(verdict: Verdict) -> list[str]:
    """Return the text of a verdict: the observation, and below it the remedy."""
    head = f"{'?' if verdict.word == 'cannot tell' else verdict.word:<4}  {verdict.what:<13} "
    indent = " " * len(head)
    lines = textwrap.wrap(verdict.seen, WIDTH, initial_indent=head, subsequent_indent=indent) or [head]
    if verdict.remedy:
        lines += textwrap.wrap(verdict.remedy, WIDTH, initial_indent=f"{indent}-> ", subsequent_indent=f"{indent}   ")
    return lines


def first_of(names: Sequence[str]) -> str:
    """Return the first three names, and the number of further ones."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


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
            yield Verdict("ok", what, "; ".join(filter(None, [audit.summary(), audit.counts_text()])))
        for finding in audit.findings:
            code = CODES.get(finding.name, "")
            yield Verdict(WORDS[finding.severity], what, finding.message, finding.remedy, code)
        for sample in audit.decoded:
            yield Verdict("ok", what, f"{sample.place}: {sample.line()}")
