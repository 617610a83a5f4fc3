"""Weights that begin far beyond the others of their tensor, and what the first steps learn with them brought nearer."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from trainwright.doctor.function.facts import WithoutOutliersFacts
from trainwright.replay.again import FirstSteps, begin_of
from trainwright.replay.experiments import experiment
from trainwright.replay.replayer import AS_IT_WAS
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts, strict

FAR, NEAR = 30.0, 10.0
"""Times the median size: of a normal distribution 30 times that are 20 deviations, which no weight has by chance; and
what is left of such a weight on the replay."""
APART = 3.0
"""Between the largest and the smallest of them: ones on a diagonal are as large as each other."""
FEWEST, SAMPLE = 64, 4096
"""Elements of a tensor, and those that its median is taken of."""


def _times(weights: Tensor) -> tuple[float, float]:
    """The median size of what is not 0, and how many times as large the largest is; 0 where that may be meant."""
    sizes = weights.detach().flatten().float().abs()
    drawn = sizes[:: max(1, len(sizes) // SAMPLE)]
    drawn = drawn[drawn > 0]
    if len(sizes) < FEWEST or len(drawn) < FEWEST // 2:
        return 0.0, 0.0
    middle, largest = float(drawn.median()), float(sizes.max())
    beyond = sizes[sizes > NEAR * middle]
    is_alike = not len(beyond) or largest <= APART * float(beyond.min())
    return middle, 0.0 if is_alike else largest / middle


@experiment(WithoutOutliersFacts.experiment, when="requested", steps=0.1)
def without_outliers(session: ReplaySession) -> Facts:
    """The first steps again, as they were and from smaller outliers, and the losses of the batches after."""
    begin = begin_of(session)
    far: dict[str, float] = {}
    weights = list(begin.parameters)
    for number, (name, each) in enumerate(zip(session.replayer.names, weights)):
        middle, times = _times(each) if each.is_floating_point() else (0.0, 0.0)
        if times > FAR:
            far[name] = times
            weights[number] = each.clamp(-NEAR * middle, NEAR * middle)
    if not far:
        return dict(strict(vars(WithoutOutliersFacts(session.step, session.step))))
    compared = FirstSteps(session).compared(AS_IT_WAS, AS_IT_WAS, replace(begin, parameters=weights))
    name = max(far, key=far.__getitem__)
    return dict(strict(vars(WithoutOutliersFacts(name=name, times=far[name], **vars(compared)))))
