"""Examines whether the outputs for a sample depend on the other samples of the batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainwright.doctor.facts.function import Deviation
from trainwright.doctor.measure.eval_passes import EvalPasses, at_rows, distance, max_distance
from trainwright.recorder.program import Operation, constants_of, tensors_of
from trainwright.recorder.user_types import Args, Kwargs
from trainwright.replay.functions import InputHandler, change_leaves
from trainwright.replay.modules import ModuleStack
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession

SEQUENTIAL = (nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoder, nn.Conv1d)
"""Layers that relate the rows of an input on purpose if it is one sequence."""


def why_related(passes: EvalPasses) -> str:
    """Returns why the rows of the input may depend on each other on purpose; "" if each row is a sample."""
    session, size = passes.session, passes.session.size or 0
    inputs, modules = session.inputs, session.modules.values()
    if any(isinstance(m, _BatchNorm) and m.running_mean is None for m in modules):
        return "a normalisation uses the statistics of the batch in eval mode too"
    held = [t for m in modules for t in (*vars(m).values(), *m._buffers.values()) if isinstance(t, Tensor)]
    if any(list(x.shape).count(size) > 1 or x.is_sparse for x in (*inputs, *held)):
        return "a matrix relates each sample to each"
    if any(not x.is_floating_point() and x.dim() == 2 and x.shape[0] == 2 != size for x in (*inputs, *held)):
        return "a list of edges relates samples"
    if is_batch(session):
        return "the model takes all samples as one set" if are_one_set(session) else ""
    if inputs[0].dim() == 2 and inputs[0].is_floating_point() and any(isinstance(m, SEQUENTIAL) for m in modules):
        return "the input may be one sequence"
    if are_one_set(session):
        return "the model takes all samples as one set"
    operations = [each for each in session.recorded_step.program if isinstance(each, Operation)]
    targets = [c.tensor for each in operations for c in constants_of((each.args, each.kwargs))]
    first = inputs[0]
    places = first.shape[0] * first.shape[1] if first.dim() > 1 else 0  # one target for each position, flattened
    lengths = {size, places, places - size}
    if not any(t.dim() and not t.requires_grad and int(t.shape[0]) in lengths for t in targets):
        return "no target says what a sample is"
    return ""


def is_batch(session: ReplaySession) -> bool:
    """Returns True if the loader defines the samples."""
    return any(ids is not None and len(ids) == session.size for ids in session.ids)


def are_one_set(session: ReplaySession) -> bool:
    """Returns True if a module gets all samples as one set, (1, samples, ...): attention between samples is
    intended.
    """
    modules, size, found = ModuleStack(session.modules), session.size, False

    def enter(path: str, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        nonlocal found
        found |= any(each.dim() > 2 and each.shape[:2] == (1, size) for each in tensors_of((args, kwargs), 2))

    change = Intervention(mode="eval", model=lambda: modules.following(enter, lambda *_: None))
    session.run(change, upto="forward")
    return found


def replacing_with_neighbour(size: int, changed: int, dim: int = 0) -> InputHandler:
    """Handler for ``Intervention.inputs`` that replaces index ``changed`` of a dimension by a copy of its neighbour.

    The copy has no graph: a derivative by an input, as in a sampler or a penalty, does not connect samples.
    """

    def change(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or leaf.dim() <= dim or leaf.shape[dim] != size:
            return leaf
        leaf = leaf.clone()
        leaf.select(dim, changed).copy_(leaf.select(dim, (changed + 1) % size).detach())
        return leaf

    def handler(number: int, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        return tuple(change(x) for x in args), {name: change(x) for name, x in kwargs.items()}

    return handler


def neighbours(passes: EvalPasses) -> Deviation | None:
    """Returns the deviation of the other samples' outputs if one sample changes; None if it cannot be measured."""
    size = passes.session.size
    if size is None or size < 3:
        return None
    for changed in (size // 2, 0):
        found = _deviation_along(passes, size, changed, 0)
        if found is not None:
            return found if not found.is_real or not _is_free_along_second(passes) else None
    return None


def _deviation_along(passes: EvalPasses, size: int, changed: int, dim: int) -> Deviation | None:
    """Returns the deviation along one dimension; None if the change has no effect or no output has the dimension."""
    change = Intervention(inputs=replacing_with_neighbour(size, changed, dim))
    outputs = passes.run(change)
    own = at_rows(lambda n: torch.arange(n, device="cpu") == changed, size, dim)
    others = at_rows(lambda n: torch.arange(n, device="cpu") != changed, size, dim)
    kept = [n for n, each in enumerate(passes.base) if each.dim() > dim and list(each.shape).count(size) == 1]
    base, now = [passes.base[n] for n in kept], [outputs[n] for n in kept]
    if not kept or max_distance(base, now, own) <= passes.limit:
        return None
    return passes.located(Deviation(max_distance(base, now, others), passes.limit), change, others)


def _is_free_along_second(passes: EvalPasses) -> bool:
    """Returns True if the samples are along the second dimension, (T, B, ...), and no loader contradicts."""
    session = passes.session
    first = session.inputs[0]
    if first.dim() < 2 or is_batch(session):
        return False
    size = int(first.shape[1])
    found = _deviation_along(passes, size, size // 2, 1) if size >= 3 and size != session.size else None
    return found is not None and not found.is_real


def place(passes: EvalPasses) -> Deviation | None:
    """Returns the deviation of a sample's output in another order of the batch.

    None if no loader defines the samples, or if other inputs belong to positions in the batch.
    """
    session, size = passes.session, passes.session.size or 0
    if size < 3 or not is_batch(session) or any(size in x.shape[1:] for x in session.inputs):
        return None
    calls = session.recorded_step.calls
    given = sum(len(constants_of((each.args, each.kwargs))) for each in calls)
    if given != sum(len(tensors_of((each.args, each.kwargs), 64)) for each in calls) and len(calls) > 1:
        return None
    if not all(x.dim() and x.shape[0] == size for x in session.inputs):
        return None
    change = Intervention(inputs=change_leaves(lambda leaf: _rolled(leaf, size)))

    def moved_back(one: Tensor, other: Tensor) -> float:
        is_by_sample = one.shape == other.shape and one.dim() and one.shape[0] == size and size not in one.shape[1:]
        return distance(one, other.roll(-1, 0)) if is_by_sample else 0.0

    found = Deviation(max_distance(passes.base, passes.run(change), moved_back), passes.limit)
    return passes.located(found, change, moved_back)


def _rolled(leaf: object, size: int) -> object:
    return leaf.roll(1, 0) if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == size else leaf
