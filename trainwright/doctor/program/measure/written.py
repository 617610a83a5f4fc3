"""Reads the source of the loop, and of the functions of its file that it may call. Nothing of it is run."""

from __future__ import annotations

import ast
import linecache
from pathlib import Path
from types import CodeType

from trainwright.doctor.program.evaluated import evaluations, periods
from trainwright.doctor.program.facts import WrittenFacts
from trainwright.doctor.program.sums import misplaced_sums
from trainwright.doctor.program.syntax import ProgramSyntax
from trainwright.doctor.program.unread import unread_values
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.runlog.json_values import Facts, strict

MOST_LINES = 4000
"""Of a longer file nothing is read: that takes about 10 us a line."""


class WrittenProbe(Probe):
    """Reads it once, at the first look."""

    name = WrittenFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._watched = watched
        self._is_read = False

    def values(self) -> Facts | None:
        code = self._watched.code()
        if self._is_read or code is None:
            return None
        self._is_read = True
        lines = linecache.getlines(code.co_filename) if Path(code.co_filename).suffix == ".py" else []
        if not 0 < len(lines) <= MOST_LINES:
            return None
        facts = _facts(code, "".join(lines), self._watched)
        return None if facts is None else dict(strict(vars(facts)))


def _facts(code: CodeType, source: str, watched: WatchedObjects) -> WrittenFacts | None:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
    program = ProgramSyntax(tree, 0 if code.co_name == "<module>" else code.co_firstlineno)
    evaluated = evaluations(program)
    return WrittenFacts(
        file=Path(code.co_filename).name,
        functions=len(program.functions),
        unread=tuple(unread_values(program)),
        misplaced=tuple(misplaced_sums(program)),
        evaluated_by=tuple(each.lineno for each in evaluated),
        periods=tuple(periods(program, evaluated, watched.numbers())),
    )
