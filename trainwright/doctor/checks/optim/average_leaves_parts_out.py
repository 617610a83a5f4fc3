"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.averages import AveragesFacts, Move
from trainwright.doctor.finding import listed
from trainwright.doctor.shared_averages import EXPLAINED, averages_of


@check(stage="update", confidence=0.85, needs=AveragesFacts)
def average_leaves_parts_out(run: RunContext) -> Iterator[Result]:
    """An average of the weights leaves some weights or buffers out.

    How it is detected: tensors of an average that stand still, or move by another fraction, while the others follow.

    Usual cause: the loop over the parameters ends early, or goes over `parameters()`, which has no running statistics.

    Fix: go over `state_dict()` of both models, or copy the buffers beside the average.

    Sources: pytorch-image-models, ModelEmaV2.
    """
    facts = run.latest(AveragesFacts)
    for copy in averages_of(facts):
        if any(max(move.rests) >= EXPLAINED for move in copy.moves):
            continue
        uneven = [name for n, name in enumerate(copy.names) if all(_is_uneven(move, n) for move in copy.moves)]
        left = [*copy.still, *(name for name in uneven if name not in copy.still)] or copy.still_buffers
        if left:
            yield run.finding(
                run.last_step,
                symptom=f"an average of {copy.of} (a {copy.kind}) leaves these out: {listed(left)}",
                since_step=copy.moves[0].step,
                evidence=[("tensors that do not move while their originals do", list(left), [])],
            )


def _is_uneven(move: Move, tensor: int) -> bool:
    usual = sorted(move.shares)[len(move.shares) // 2]
    return abs(move.shares[tensor] - usual) > 0.1 * abs(usual)
