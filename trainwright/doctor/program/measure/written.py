"""Reads the source of the loop, and of the functions of its file that it may call. Nothing of it is run."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import CodeType

from trainwright.doctor.program.bests import broken_bests
from trainwright.doctor.program.evaluated import evaluations, figures, periods, worked_with
from trainwright.doctor.program.exchanged import exchanged_arguments
from trainwright.doctor.program.facts import WrittenFacts
from trainwright.doctor.program.sums import misplaced_sums
from trainwright.doctor.program.syntax import ProgramSyntax
from trainwright.doctor.program.unread import unread_values
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.runlog.json_values import Facts, strict

MOST_LINES = 4000
"""Of a longer file nothing is read: that takes about 10 us a line."""


class WrittenProbe(Probe):
    """Reads it at the first look. Later it is told again where a figure of the evaluations has got a value."""

    name = WrittenFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._watched = watched
        self._is_read = False
        self._facts: WrittenFacts | None = None

    def values(self) -> Facts | None:
        if not self._is_read:
            self._is_read = True
            self._facts = _facts(self._watched)
        elif self._facts is not None and self._facts.unset:
            left = _unset(self._facts.unset, self._watched)
            if left == self._facts.unset:
                return None
            self._facts = replace(self._facts, unset=left)
        else:
            return None
        return None if self._facts is None else dict(strict(vars(self._facts)))


def program_of(code: CodeType | None) -> ProgramSyntax | None:
    """The file of the function that holds the loop; None where it cannot be read."""
    lines = linecache.getlines(code.co_filename) if code and code.co_filename.endswith(".py") else []
    if code is None or not 0 < len(lines) <= MOST_LINES:
        return None
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError, RecursionError):
        return None
    return ProgramSyntax(tree, 0 if code.co_name == "<module>" else code.co_firstlineno)


def _facts(watched: WatchedObjects) -> WrittenFacts | None:
    code, program = watched.code(), program_of(watched.code())
    if code is None or program is None:
        return None
    evaluated, numbers = evaluations(program), watched.numbers()
    return WrittenFacts(
        file=Path(code.co_filename).name,
        functions=len(program.functions),
        unread=tuple(unread_values(program)),
        misplaced=tuple(misplaced_sums(program)),
        bests=tuple(broken_bests(program)),
        exchanged=tuple(exchanged_arguments(program)),
        evaluated_by=tuple(each.lineno for each in evaluated),
        periods=tuple(periods(program, evaluated, numbers)),
        unset=_unset(figures(program, evaluated), watched),
        worked_with=tuple(worked_with(program)),
    )


def _unset(names: Sequence[str], watched: WatchedObjects) -> tuple[str, ...]:
    """Those that still hold the very constant of the source: a 0.0 that was computed is another object."""
    code, numbers = watched.code(), watched.numbers()
    constants = [
        part for each in (code.co_consts if code else ()) for part in (each if type(each) is tuple else (each,))
    ]
    held = [(name, numbers.get(name, numbers.get(f"{name}.0"))) for name in names]
    return tuple(name for name, value in held if value is not None and any(value is each for each in constants))
