"""A step with outputs of its models that are so many times as large, or with frozen weights that are trained, for
experiments of several families.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from trainwright.recorder.program import Call, RecordedStep, mapped
from trainwright.replay.session import ReplaySession

FACTORS = (3.0, 10.0, 30.0, 100.0, 1e3, -10.0, -1e3, 1e-3)
OTHER_OUTPUTS = (*((factor, 0.0) for factor in FACTORS), (1.0, 1e3), (1.0, -1e3))
"""Factors of outputs, and what is added to them: to either side of any threshold, margin or clamp, surer (up to where a
softmax has no gradient left), less sure, of the opposite opinion. What one of them left out has a part in the loss
with one of these.
"""


def without_zeros(tensor: Tensor) -> Tensor:
    """For ``Intervention.constants``: numbers that are all 0, such as weights that a schedule raises, are 1."""
    return torch.ones_like(tensor) if tensor.is_floating_point() and not tensor.any() else tensor


def as_if_trained(recorded: RecordedStep, parameters: Sequence[Tensor], frozen: Sequence[Tensor]) -> RecordedStep:
    """The step with these of the ``parameters`` of its replayer wanting a gradient."""
    chosen = set(map(id, frozen))
    program = [
        replace(each, wanted=tuple(was or id(p) in chosen for was, p in zip(each.wanted, parameters)))
        if isinstance(each, Call)
        else each
        for each in recorded.program
    ]
    return replace(recorded, program=program)


@contextmanager
def scaled_outputs(session: ReplaySession, factor: float, more: float = 0.0) -> Iterator[None]:
    """Inside, every output of a model is so many times as large, and so much more. For ``Intervention.model``."""

    def change(leaf: object) -> object:
        return leaf * factor + more if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    if (factor, more) == (1.0, 0.0):
        yield
        return
    handles = [root.register_forward_hook(lambda _module, _args, out: mapped(out, change)) for root in session.roots]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
