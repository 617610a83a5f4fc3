"""What linear layers in a row would gain from an activation between them, by updates on one batch."""

from __future__ import annotations

import time
from collections.abc import Collection

from trainwright.doctor.function.measure.structure import wired
from trainwright.recorder.program import tensors_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.experiments import experiment
from trainwright.replay.replayer import Intervention, NotReplayable
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts

STEPS, MOST = 8, 128
"""Updates at least, and at most: the gain from depth shows late."""


def activated(session: ReplaySession, weights: Collection[str]) -> Intervention:
    """A ReLU after each of these linear layers."""
    chosen = {id(session.parameters[name]) for name in weights}

    def change(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        output = function(*args, **kwargs)
        return output.relu() if any(id(x) in chosen for x in tensors_of(args, 2)[1:2]) else output

    return Intervention(ops=change)


def on_one_batch(session: ReplaySession, change: Intervention, most: int = STEPS) -> tuple[list[float], list[float]]:
    """The losses of updates on this batch alone, as it was and changed.

    As many updates as take half a second, at least ``STEPS`` and at most ``most``.
    """
    begin_s = time.perf_counter()
    session.run()
    steps = max(STEPS, min(most, int(0.5 / (time.perf_counter() - begin_s))))
    was, now = session.train(steps, repeat=True), session.train(steps, change, repeat=True)
    if len(now) < steps or len(was) < steps:
        raise NotReplayable("the step could not be run again")
    return was, now


@experiment("activation_between", when="requested", steps=240.0)
def activation_between(session: ReplaySession) -> Facts:
    """Updates on one batch with an activation after each linear layer whose output only another one takes."""
    weights = {chain["first"] for chain in wired(session).unbroken_chains()}
    was, now = on_one_batch(session, activated(session, weights), MOST)
    return {"as_it_was": was[-1], "activated": now[-1], "updates": len(was)}
