"""Which inputs have an effect on the outputs."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from trainwright.doctor.facts.function import InputsFacts
from trainwright.doctor.measure.eval_passes import EvalPasses, apart, in_place_of
from trainwright.replay.replayer import AS_IT_WAS, Intervention

MOST = 8
"""Inputs that are tried, each by a forward pass of the whole step; those of further micro-batches go the same way."""


def unused_inputs(passes: EvalPasses) -> InputsFacts:
    """The inputs that all samples can have of the first one without any effect."""
    size = passes.session.size
    inputs = list(islice((x for x in passes.session.inputs if x.dim() and x.shape[0] == size and _varies(x)), MOST))
    return InputsFacts(len(inputs), tuple(n for n, x in enumerate(inputs) if not _has_effect(passes, x, _of_first(x))))


def _varies(x: Tensor) -> bool:
    return bool((x != x[:1]).any())


def _of_first(x: Tensor) -> Tensor:
    """The first sample in place of each; another order of the samples would leave their mean as it is."""
    return x[:1].expand_as(x).clone()


def _has_effect(passes: EvalPasses, x: Tensor, other: Tensor) -> bool:
    """Whether any output, of whatever shape, is another one in either mode, or the loss, which may take it as well."""
    now = passes.run(Intervention(inputs=in_place_of(x, other)))
    if not now or len(now) != len(passes.base) or any(a.shape != b.shape for a, b in zip(passes.base, now)):
        return True
    return apart(passes.base, now) > 0.0 or _loss(passes, AS_IT_WAS) != _loss(passes, _everywhere(x, other))


def _loss(passes: EvalPasses, change: Intervention) -> tuple[float, str]:
    """In train mode, with the random numbers of the step; and the error of what cannot be computed."""
    result = passes.session.run(change, upto="forward")
    return (0.0, str(result.error)) if result.error is not None else (result.loss, "")


def _everywhere(x: Tensor, other: Tensor) -> Intervention:
    """``other`` where the model is given ``x``, and where the loop makes something of it, or of a view of it."""
    other = torch.empty_like(x).copy_(other)

    def changed(tensor: Tensor) -> Tensor:
        if tensor is x:
            return other
        is_view = tensor._base is not None and tensor._base is (x if x._base is None else x._base)
        if not is_view or x.numel() * x.element_size() != x.untyped_storage().nbytes():
            return tensor
        return other.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    return Intervention(inputs=in_place_of(x, other), constants=changed)
