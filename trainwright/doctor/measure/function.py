"""Replays of the forward pass in eval mode with one thing changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from trainwright.doctor.facts.function import Deviation, FunctionFacts
from trainwright.doctor.measure import samples, sequences
from trainwright.doctor.measure.eval_passes import EvalPasses, numbers_of
from trainwright.replay.experiments import replay
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession


@replay(FunctionFacts, when="first", value=2.0)
def function(session: ReplaySession) -> FunctionFacts:
    """Replays the forward pass in eval mode with other neighbours, in another order, and without padding."""
    passes = EvalPasses(session)
    noise = passes.deviation(passes.run(Intervention(fresh_rng=True, model=_other_random_numbers)))
    carried, written = _again(passes)
    repeats = not noise.is_real and not carried.is_real
    related = samples.why_related(passes) if session.inputs else "no input"
    padding, pad = sequences.padding(passes) if repeats else (None, "")
    return FunctionFacts(
        written=written,
        neighbours=passes.confirmed(samples.neighbours) if repeats and not related else None,
        related=related,
        is_batch=samples.is_batch(session),
        place=passes.confirmed(samples.place) if repeats and not related else None,
        padding=padding,
        pad=pad,
    )


@contextmanager
def _other_random_numbers() -> Iterator[None]:
    """Context with another random seed. Used within ``stage``, which restores the generators."""
    torch.manual_seed(0x5EED)
    yield


def _again(passes: EvalPasses) -> tuple[Deviation, tuple[str, ...]]:
    """Returns the deviation of a second call from the first, and the buffers that the calls wrote to."""
    session, change = passes.session, Intervention(mode="eval")
    with session.live():
        before = {name: buffer.clone() for name, buffer in _buffers(session).items()}
        session.replayer.run(session.recorded_step, change, upto="forward")
        result = session.replayer.run(session.recorded_step, change, upto="forward")
        written = [name for name, now in _buffers(session).items() if not _are_equal(before.get(name), now)]
    return passes.deviation(numbers_of(result.outputs)), tuple(written[:8])


def _buffers(session: ReplaySession) -> dict[str, Tensor]:
    named = ((f"{path}.{name}".lstrip("."), b) for path, m in session.modules.items() for name, b in m._buffers.items())
    return {name: buffer for name, buffer in named if buffer is not None}


def _are_equal(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.shape == other.shape and bool(((one == other) | (one != one)).all())
