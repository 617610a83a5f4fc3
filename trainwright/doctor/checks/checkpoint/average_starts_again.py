"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.checkpoint import ResumeFacts

FAR, FOLLOWS = 0.5, 0.8
"""Relative distance, and cosine between the moves of the average and the direction to the weights."""


@check(stage="update", confidence=0.85, needs=ResumeFacts)
def average_starts_again(run: RunContext) -> Iterator[Result]:
    """An average of the weights starts far away from them after a resume: it was not restored.

    Why it matters: the average is evaluated and saved, and is for thousands of steps one of random weights.

    How it is detected: in a run that goes on with moments of an earlier one, a module like the model that nothing
    trains begins at least half of the weights' size away from them, and moves straight towards them.

    Exceptions: a teacher or a reference that does not follow the weights.

    Usual cause: the state of the average was not saved, or the average was made before the weights were loaded.

    Fix: save and load the state of the average; or make it from the loaded weights.

    Sources: ai2cm/ace #349, m2lines/Samudra #282, Vchitect/Latte #55, lightly-train PR 892.
    """
    facts = run.latest(ResumeFacts)
    for average in facts.averages if facts else ():
        if average.distance >= FAR and average.follows >= FOLLOWS:
            yield run.finding(
                1,
                symptom=f"an average of the weights begins {average.distance:.0%} of their size away from them",
                since_step=1,
                evidence=[("distance from the weights, relative", round(average.distance, 3), "below 0.2")],
            )
            return
