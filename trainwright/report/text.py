"""The closing lines of a run: a verdict, the run folder, what was reached, the next command."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainwright.runlog.records import Ended, Evaluated, Found

WAITS_S = 1e-3
"""A mean wait for each step below which none is told: to hand a batch over takes a worker as long."""


@dataclass(frozen=True)
class Ending:
    """The facts for the closing lines. ``again`` is the command that continues the run.

    ``longer`` is the option that doubles its length, appended to ``again``; ``saved``: the last state is on disk.
    ``findings`` are the doctor's. ``wait_s`` is how long a step waited for data in the mean, and ``wait_share`` the
    share of the time of all steps that this was; ``reads_faster`` is what would make it less.
    """

    ended: Ended
    run: Path
    wait_share: float
    evaluated: Evaluated | None
    saved: bool
    marks: Mapping[str, float]
    again: str
    longer: str
    findings: Sequence[Found] = ()
    wait_s: float = 0.0
    reads_faster: str = ""


def closing(ending: Ending) -> list[str]:
    """Lines to print: the verdict, then exactly three lines (run, reached, next)."""
    goes_on = ending.ended.ending == "stopped" or not ending.saved or not ending.longer
    anew = " train " in ending.again
    step = f"{ending.again}   # {'begins anew: nothing is saved' if anew else 'goes on from the newest checkpoint'}"
    if not goes_on:
        step = f"{ending.again} {ending.longer}   # trains it further"
    return [
        f"verdict: {verdict(ending)}",
        f"run      {ending.run}",
        f"reached  {reached(ending)}",
        f"next     {step}",
    ]


def verdict(ending: Ending) -> str:
    """One sentence on whether the run is healthy."""
    ended = ending.ended
    loss = ended.val_loss if ended.val_loss is not None else ended.loss
    troubles = []
    if loss is not None and not math.isfinite(loss):
        troubles.append("the loss is not finite")
    if ended.skipped:
        troubles.append(f"{ended.skipped} of {ended.step} updates were skipped (log.jsonl names each)")
    if ending.wait_share > 0.3 and ending.wait_s > WAITS_S:
        what_to_do = f" ({ending.reads_faster})" if ending.reads_faster else ""
        troubles.append(f"{ending.wait_share:.0%} of the time went into waiting for data{what_to_do}")
    if not ending.saved:
        troubles.append("the last state could not be saved")
    if faults := [f"{found.code} ({found.severity})" for found in ending.findings if found.severity != "info"]:
        troubles.append(f"the doctor found {', '.join(faults)}")
    how = {"finished": "finished", "stopped": f"stopped by {ended.reason}", "data_exhausted": "out of data"}
    head = how.get(ended.ending, ended.ending)
    if troubles:
        return f"{head}, but {'; '.join(troubles)}"
    healthy = "and healthy" if ended.ending == "finished" else "after healthy steps"
    return f"{head} {healthy}: no update skipped, every value finite{_passed(loss, ending.marks)}"


def reached(ending: Ending) -> str:
    """Steps and losses."""
    ended, seen = ending.ended, ending.evaluated
    parts = [f"step {ended.step:,}"]
    if ended.loss is not None:
        parts.append(f"training loss {ended.loss:.4f}")
    if seen is not None:
        parts.append(f"validation loss {seen.loss:.4f}")
        parts += [f"{name} {value:.4g}" for name, value in seen.metrics.items()]
    return ", ".join(parts)


def _passed(loss: float | None, marks: Mapping[str, float]) -> str:
    below = [(value, name) for name, value in marks.items() if loss is not None and loss < value]
    if not below:
        return ""
    value, name = min(below)
    return f"; the loss is {value - loss:.2f} below what a {name} table reaches ({value:.2f})" if loss else ""
