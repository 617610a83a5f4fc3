"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.wiring import WiringFacts
from trainwright.runlog.records import Where


@check(stage="forward", confidence=0.95, needs=WiringFacts)
def positions_low_precision(run: RunContext) -> Iterator[Result]:
    """Positions are computed in 16 bits, so neighbouring positions have equal angles.

    How it is detected: the arguments of `sin` and `cos` on a replay: rows above position 256 that equal their
    neighbour.

    Usual cause: positions or angles pass through bfloat16, which counts exactly to 256 only.

    Fix: positions and angles in float32, outside of autocast; cast the sine and cosine afterwards.

    Sources: huggingface/transformers PR #29285, Megatron-LM#535.
    """
    facts = run.latest(WiringFacts)
    if facts is not None and facts.aliases:
        alias = facts.aliases[0]
        yield run.finding(
            run.every(WiringFacts)[-1][0],
            symptom=f"{alias.same} of {alias.far} positions above 256 have the same angles as their neighbour",
            where=Where(module=alias.module, op="sin", dtype=alias.dtype),
            evidence=[("positions with the angles of their neighbour", alias.same, 0)],
        )
