"""The closing lines of a run: verdict, run folder, results, next command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainwright.runs.figures import figure
from trainwright.runs.records import Ended, Evaluated


@dataclass(frozen=True)
class Ending:
    """The facts for the closing lines.

    Args:
        ended: The record of the end, with its verdict.
        run: The run folder.
        evaluated: The last evaluation.
        saved: True if the last state is on disk.
        again: The command that continues the run.
        longer: The option that doubles its length, appended to ``again``.
    """

    ended: Ended
    run: Path
    evaluated: Evaluated | None
    saved: bool
    again: str
    longer: str


def closing(ending: Ending) -> list[str]:
    """Return the lines to print: the verdict, then exactly three lines (run, reached, next)."""
    goes_on = ending.ended.ending == "stopped" or not ending.saved or not ending.longer
    restarts = " train " in ending.again
    step = (
        f"{ending.again}   # {'starts again: nothing is saved' if restarts else 'continues from the newest checkpoint'}"
    )
    if not goes_on:
        step = f"{ending.again} {ending.longer}   # trains it further"
    return [
        f"verdict: {ending.ended.verdict}",
        f"run      {ending.run}",
        f"reached  {reached(ending)}",
        f"next     {step}",
    ]


def cost(ended: Ended) -> list[str]:
    """Return energy and price as text, if they are known."""
    energy = [] if ended.energy_kwh is None else [f"{ended.energy_kwh:.3g} kWh"]
    return energy + ([] if ended.usd is None else [f"{ended.usd:.2f} USD"])


def reached(ending: Ending) -> str:
    """Return steps and losses as text."""
    ended, seen = ending.ended, ending.evaluated
    parts = [f"step {ended.step:,}"]
    if ended.loss is not None:
        parts.append(f"training loss of the last step {figure(ended.loss)}")
    if seen is not None:
        parts.append(f"validation loss {figure(seen.loss)}")
        parts += [f"{name} {value:.4g}" for name, value in seen.metrics.items()]
    parts += cost(ended)
    return ", ".join(parts)
