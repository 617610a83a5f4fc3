"""Which inputs, and which of their columns, have an effect on the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from trainwright.doctor.function.facts import InputsFacts
from trainwright.doctor.function.measure.passes import EvalPasses, apart, in_place_of
from trainwright.recorder.program import tensors_of
from trainwright.replay.replayer import AS_IT_WAS, Intervention

COLUMNS_OF = {2: 1, 4: 1}
"""By the number of dimensions of an input: which one holds columns or channels, and not places."""
MOST = 8
"""Inputs that are tried, each by a forward pass of the whole step; those of further micro-batches go the same way."""


def idle_inputs(passes: EvalPasses) -> InputsFacts:
    """The inputs, and the columns of the first one, that all samples can have of the first one without any effect."""
    size = passes.session.size
    inputs = list(islice((x for x in passes.session.inputs if x.dim() and x.shape[0] == size and _varies(x)), MOST))
    idle = [n for n, x in enumerate(inputs) if not _has_effect(passes, x, _of_first(x))]
    if not inputs or idle:
        return InputsFacts(len(inputs), idle=tuple(idle))
    first = inputs[0]
    dim = COLUMNS_OF.get(first.dim())
    if dim is None or not first.is_floating_point():
        return InputsFacts(len(inputs))
    columns = [n for n in range(int(first.shape[dim])) if _varies(first.select(dim, n))]
    without = _without_gradient(passes, first, dim)
    suspects = [n for n in columns if n in without]
    if not suspects or len(suspects) == len(columns):
        return InputsFacts(len(inputs), len(columns))
    changed = first.clone()
    at = torch.tensor(suspects, device=first.device)
    changed.index_copy_(dim, at, _of_first(first.index_select(dim, at)))
    idle_columns = () if _has_effect(passes, first, changed) else tuple(suspects)
    return InputsFacts(len(inputs), len(columns), idle_columns=idle_columns)


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


def _without_gradient(passes: EvalPasses, x: Tensor, dim: int) -> set[int]:
    """Columns to which no output has a gradient other than 0, for any sample."""
    session = passes.session
    leaf = x.detach().clone().requires_grad_()
    outputs: list[Tensor] = []
    with session.live():
        hooks = [
            root.register_forward_hook(lambda module, args, output: outputs.extend(tensors_of(output)))
            for root in session.roots
        ]
        try:
            change = Intervention(inputs=in_place_of(x, leaf), mode="eval")
            session.replayer.run(session.recorded_step, change, upto="forward")
        finally:
            for hook in hooks:
                hook.remove()
        made = [each for each in outputs if each.requires_grad and each.is_floating_point()]
        if not made:
            return set()
        weights = [torch.randn_like(each) for each in made]
        grads: Sequence[Tensor | None] = torch.autograd.grad(made, [leaf], weights, allow_unused=True)
    if (grad := grads[0]) is None:
        return set()
    others = [n for n in range(grad.dim()) if n != dim]
    return set((grad.abs().amax(others) == 0).nonzero().flatten().tolist())
