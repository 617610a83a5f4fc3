"""Which rows of a batch count: to the outputs for which of them the loss has a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainwright.doctor.loss.facts import CountedFacts
from trainwright.recorder.program import tensors_of
from trainwright.replay.experiments import experiment
from trainwright.replay.replayer import Intervention, NotReplayable
from trainwright.replay.scaled import OTHER_OUTPUTS, scaled_outputs, without_zeros
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts, strict

LEAST = 4
"""Rows of a batch of which one can be left out."""


@experiment(CountedFacts.experiment, when="requested")
def rows_that_count(session: ReplaySession) -> Facts:
    """The rows of the outputs to which the loss has a gradient other than 0, over all calls of the models."""
    size, recorded = session.size, session.recorded_step
    if size is None or size < LEAST or len(recorded.calls) != 1:
        raise NotReplayable("the step has no batch of its own, or several")
    idle = _without_gradient(session, size)
    never = idle
    for factor, more in OTHER_OUTPUTS:
        never = never & _without_gradient(session, size, factor, more) if never else never
    never = never & _without_gradient(session, size, constants=without_zeros) if never else never
    are_samples = any(ids is not None and len(ids) == size for ids in session.ids)
    total = float(session.inputs[0].double().sum())
    facts = CountedFacts(size, tuple(sorted(idle)), are_samples, total, tuple(sorted(idle - never)))
    return dict(strict(vars(facts)))


def _without_gradient(
    session: ReplaySession,
    size: int,
    factor: float = 1.0,
    more: float = 0.0,
    constants: Callable[[Tensor], Tensor] | None = None,
) -> set[int]:
    """The rows of the outputs to which the loss has a gradient of 0, where these, or what comes from outside, are
    others.
    """
    counts = torch.zeros(size, dtype=torch.bool, device="cpu")
    heard: list[bool] = []

    def note(gradient: Tensor) -> None:
        counts.logical_or_(gradient.detach().nan_to_num(0.0).flatten(1).ne(0).any(1).cpu())

    def listen(module: nn.Module, args: object, output: object) -> None:
        for each in tensors_of(output):
            if each.requires_grad and each.dim() > 1 and each.shape[0] == size:
                each.register_hook(note)  # type: ignore[no-untyped-call]
                heard.append(True)

    @contextmanager
    def listening() -> Iterator[None]:
        handles = [root.register_forward_hook(listen) for root in session.roots]
        try:
            with scaled_outputs(session, factor, more):
                yield
        finally:
            for handle in handles:
                handle.remove()

    result = session.run(Intervention(model=listening, constants=constants))
    if result.error is not None:
        raise result.error
    if not heard:
        raise NotReplayable("no output has a row for each sample")
    return set((~counts).nonzero().flatten().tolist())
