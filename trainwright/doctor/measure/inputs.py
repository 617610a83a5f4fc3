"""Finds inputs that have no effect on the outputs."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from trainwright.doctor.facts.function import InputsFacts
from trainwright.doctor.measure.eval_passes import EvalPasses, max_distance, replacing_input
from trainwright.replay.replayer import UNCHANGED, Intervention

MAX_INPUTS = 8
"""Maximum number of inputs that are examined, each by a forward pass of the full step."""


def unused_inputs(passes: EvalPasses) -> InputsFacts:
    """Returns the inputs that can be replaced by their first sample without any effect."""
    size = passes.session.size
    inputs = list(
        islice((x for x in passes.session.inputs if x.dim() and x.shape[0] == size and _varies(x)), MAX_INPUTS)
    )
    return InputsFacts(
        len(inputs), tuple(n for n, x in enumerate(inputs) if not _has_effect(passes, x, _first_repeated(x)))
    )


def _varies(x: Tensor) -> bool:
    return bool((x != x[:1]).any())


def _first_repeated(x: Tensor) -> Tensor:
    """Returns the first sample repeated. A permutation of the samples would not change their mean."""
    return x[:1].expand_as(x).clone()


def _has_effect(passes: EvalPasses, x: Tensor, other: Tensor) -> bool:
    """Returns True if an output or the loss changes, in train or eval mode."""
    now = passes.run(Intervention(inputs=replacing_input(x, other)))
    if not now or len(now) != len(passes.base) or any(a.shape != b.shape for a, b in zip(passes.base, now)):
        return True
    return max_distance(passes.base, now) > 0.0 or _loss(passes, UNCHANGED) != _loss(passes, _everywhere(x, other))


def _loss(passes: EvalPasses, change: Intervention) -> tuple[float, str]:
    """Returns the loss in train mode with the random numbers of the step, and the error message, if any."""
    result = passes.session.run(change, upto="forward")
    return (0.0, str(result.error)) if result.error is not None else (result.loss, "")


def _everywhere(x: Tensor, other: Tensor) -> Intervention:
    """Replaces ``x`` by ``other`` in the model's inputs and in operations of the loop on ``x`` or its views."""
    other = torch.empty_like(x).copy_(other)

    def changed(tensor: Tensor) -> Tensor:
        if tensor is x:
            return other
        is_view = tensor._base is not None and tensor._base is (x if x._base is None else x._base)
        if not is_view or x.numel() * x.element_size() != x.untyped_storage().nbytes():
            return tensor
        return other.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    return Intervention(inputs=replacing_input(x, other), constants=changed)
