"""Counts functions that torch.compile compiles again during the training, and reads the reasons that torch records."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from trainwright.doctor.facts.resources import CompilationFacts, CompiledFunction
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import RecordedStep

FIRST_STEPS = 4
"""Steps in which each function is expected to be compiled, also for a short last batch or an accumulation window."""
MAX_REASONS = 3


class Compilations(Probe):
    """Reads the records that torch keeps of its last 64 compilations. Costs nothing in a step."""

    name = CompilationFacts.experiment
    only_changes = True

    def __init__(self, watched: WatchedObjects) -> None:
        self._since_us = sys.maxsize
        self._known: dict[object, Any] = {}

    def on_closed(self, step: RecordedStep) -> None:
        if step.step == FIRST_STEPS:
            self._since_us = time.time_ns() // 1000

    def facts(self) -> CompilationFacts | None:
        dynamo = sys.modules.get("torch._dynamo.utils")  # loaded when something is compiled
        if dynamo is None:
            return None
        for each in dynamo.get_compilation_metrics():
            if each.recompile_reason and each.start_time_us and each.start_time_us > self._since_us:
                self._known[each.compile_id] = each
        by_frame: dict[str, list[Any]] = defaultdict(list)
        for each in self._known.values():
            by_frame[str(each.compile_id).partition("/")[0]].append(each)
        found = [_summary(each) for each in by_frame.values() if any(one.co_name for one in each)]
        return CompilationFacts(again=tuple(sorted(found, key=lambda each: -each.times)))


def _summary(records: list[Any]) -> CompiledFunction:
    """Summarizes the records of one function. The record at which torch stops compiling has no name."""
    named = [each for each in records if each.co_name]
    return CompiledFunction(
        named[-1].co_name,
        f"{Path(named[-1].co_filename).name}:{named[-1].co_firstlineno}",
        len(named),
        sum(each.duration_us or 0 for each in named) / 1e6,
        tuple(_guard(each.recompile_reason) for each in named[-MAX_REASONS:]),
        gave_up=len(named) < len(records),
    )


def _guard(reason: str) -> str:
    """Returns the failed guard, without the number of the compilation and torch's hint."""
    line = reason.partition("\n")[0].partition("(HINT")[0]
    return " ".join(line.partition(": ")[2].split())
