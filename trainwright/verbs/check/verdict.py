"""What a check says: one line a verdict, with the remedy; all of them on one screen."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Word = Literal["ok", "warn", "fail", "cannot tell"]

WOULD_NOT_TRAIN = 3
WIDTH = 118


@dataclass(frozen=True)
class Verdict:
    """One thing that was looked at. ``fail``: the run would not train, or what it would tell could not be believed.

    ``code`` names a page of ``trainwright explain``, where the doctor found it.
    """

    word: Word
    what: str
    seen: str
    remedy: str = ""
    code: str = ""


@dataclass
class Checkup:
    """The verdicts of one recipe, in the order in which they were found, each told at once to ``tell``."""

    recipe: str
    tell: Callable[[str], None] = lambda text: None
    verdicts: list[Verdict] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = True
    """False where something kept the rest from being looked at."""

    def add(self, verdict: Verdict) -> Verdict:
        """Keeps a verdict and tells it."""
        self.verdicts.append(verdict)
        for line in lines_of(verdict):
            self.tell(line)
        return verdict

    @property
    def exit_code(self) -> int:
        return WOULD_NOT_TRAIN if any(each.word == "fail" for each in self.verdicts) else 0

    def summary(self) -> str:
        """The last line."""
        count = {word: sum(each.word == word for each in self.verdicts) for word in ("ok", "warn", "fail")}
        unknown = len(self.verdicts) - sum(count.values())
        said = "this would not train" if count["fail"] else "nothing stands in the way of training"
        if not count["fail"] and count["warn"]:
            said = "this would train; look at the warnings"
        told = ", ".join(f"{n} {word}" for word, n in count.items() if n)
        rest = "" if self.complete else "; the rest was not looked at"
        return f"{said} ({told}{f', {unknown} cannot tell' if unknown else ''}; {self.seconds:.0f} s){rest}"

    def to_json(self) -> dict[str, Any]:
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
    """Two lines or so of text: the verdict, and below it the remedy."""
    head = f"{'?' if verdict.word == 'cannot tell' else verdict.word:<4}  {verdict.what:<13} "
    indent = " " * len(head)
    told = textwrap.wrap(verdict.seen, WIDTH, initial_indent=head, subsequent_indent=indent) or [head]
    if verdict.remedy:
        told += textwrap.wrap(verdict.remedy, WIDTH, initial_indent=f"{indent}-> ", subsequent_indent=f"{indent}   ")
    return told
