"""The verdicts of a check: one line each with its remedy; all of them fit on one screen."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

Word = Literal["ok", "warn", "fail", "cannot tell"]

WOULD_NOT_TRAIN = 3
WIDTH = 118


@dataclass(frozen=True)
class Verdict:
    """The result of one check. ``fail``: the run would not train, or its results could not be trusted.

    ``code`` names a page of ``trainwright explain``; "" without one.
    """

    word: Word
    what: str
    seen: str
    remedy: str = ""
    code: str = ""


@dataclass
class Checkup:
    """The verdicts of one recipe in the order in which they were found; each is printed at once by ``tell``."""

    recipe: str
    tell: Callable[[str], None] = lambda text: None
    verdicts: list[Verdict] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = True
    """False where something kept the rest from being checked."""

    def add(self, verdict: Verdict) -> Verdict:
        """Adds a verdict and prints its lines."""
        self.verdicts.append(verdict)
        for line in lines_of(verdict):
            self.tell(line)
        return verdict

    @property
    def exit_code(self) -> int:
        """3 when any verdict is ``fail``, else 0."""
        return WOULD_NOT_TRAIN if any(each.word == "fail" for each in self.verdicts) else 0

    def summary(self) -> str:
        """The last line."""
        count = {word: sum(each.word == word for each in self.verdicts) for word in ("ok", "warn", "fail")}
        unknown = len(self.verdicts) - sum(count.values())
        result = "this would not train" if count["fail"] else "nothing stands in the way of training"
        if not count["fail"] and count["warn"]:
            result = "this would train; look at the warnings"
        counts = ", ".join(f"{n} {word}" for word, n in count.items() if n)
        rest = "" if self.complete else "; the rest was not checked"
        return f"{result} ({counts}{f', {unknown} cannot tell' if unknown else ''}; {self.seconds:.0f} s){rest}"

    def to_json(self) -> dict[str, object]:
        """What ``--json`` prints."""
        return {
            "recipe": self.recipe,
            "trains": self.exit_code == 0,
            "complete": self.complete,
            "verdicts": [asdict(each) for each in self.verdicts],
            "seconds": round(self.seconds, 2),
            "exit": self.exit_code,
        }


def lines_of(verdict: Verdict) -> list[str]:
    """The lines of text of a verdict: what was seen, and below it the remedy."""
    head = f"{'?' if verdict.word == 'cannot tell' else verdict.word:<4}  {verdict.what:<13} "
    indent = " " * len(head)
    lines = textwrap.wrap(verdict.seen, WIDTH, initial_indent=head, subsequent_indent=indent) or [head]
    if verdict.remedy:
        lines += textwrap.wrap(verdict.remedy, WIDTH, initial_indent=f"{indent}-> ", subsequent_indent=f"{indent}   ")
    return lines


def first_of(names: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
