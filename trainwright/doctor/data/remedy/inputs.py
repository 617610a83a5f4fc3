"""Trials of remedies for faults of the data: the recorded steps with the data as it should have been."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.classified import classified
from trainwright.replay.functions import OpHandler, change_leaves, function_name
from trainwright.replay.replayer import AS_IT_WAS, Intervention
from trainwright.replay.samples import classes_of, on_column, pooled, standardised
from trainwright.replay.session import ReplaySession
from trainwright.replay.trials import NotTried, course, trial

STEPS = 12


def _compared(session: ReplaySession, what: str, intervention: Intervention) -> str:
    as_it_was, changed = session.train(STEPS, repeat=True), session.train(STEPS, intervention, repeat=True)
    return f"loss of this batch in {STEPS} updates on it {what}: {course(changed)}; as it was: {course(as_it_was)}"


@trial("standardised_inputs")
def standardised_inputs(session: ReplaySession) -> str:
    """Inputs with mean 0 and standard deviation 1."""
    return _compared(session, "with standardised inputs", Intervention(inputs=standardised))


@trial("varied_inputs")
def varied_inputs(session: ReplaySession) -> str:
    """Random inputs that differ between samples: shows whether model and loss are in order."""
    drawn: dict[int, Tensor] = {}
    generator = torch.Generator().manual_seed(0)

    def draw(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dim() < 2:
            return leaf
        if leaf.data_ptr() not in drawn:
            drawn[leaf.data_ptr()] = torch.randn(leaf.shape, generator=generator, device="cpu").to(leaf)
        return drawn[leaf.data_ptr()]

    random = Intervention(inputs=change_leaves(draw))
    return _compared(session, "with inputs that differ between samples (random)", random)


@trial("without_column")
def without_column(session: ReplaySession, column: int) -> str:
    """Zeros in one column of the input."""
    return _compared(session, f"without column {column}", Intervention(inputs=on_column(column, torch.zeros_like)))


@trial("ignore_padding")
def ignore_padding(session: ReplaySession, pad: int) -> str:
    """``ignore_index`` in the loss, measured by the loss of the targets that are not padding."""
    losses: dict[bool, list[float]] = {False: [], True: []}

    def ignoring(change: bool) -> OpHandler:
        def call(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
            loss = classified(function_name(function), args, kwargs)
            if loss is None:
                return function(*args, **kwargs)
            changed = {**kwargs, "ignore_index": pad}
            with torch.no_grad():
                count = int((loss.target != pad).sum()) if loss.is_sum else 1
                losses[change].append(float(function(*args, **changed)) / max(1, count))
            return function(*args, **(changed if change else kwargs))

        return call

    for change in losses:
        session.train(STEPS, Intervention(ops=ignoring(change)), repeat=True)
    if not losses[True]:
        raise NotTried("the loss is not a cross-entropy")
    return (
        f"loss of real tokens in {STEPS} updates with ignore_index={pad}: {course(losses[True])}; "
        f"as it was: {course(losses[False])}"
    )


@trial("mixed_samples")
def mixed_samples(session: ReplaySession) -> str:
    """The recorded samples in another order."""
    target = classes_of(session)[1]
    samples = None if target is None else pooled(session, target)
    if samples is None or len(samples.at) < 4:
        raise NotTried("no two recorded steps have samples of the same kind")
    order = torch.randperm(len(samples.y), generator=torch.Generator().manual_seed(0), device="cpu").to(
        samples.y.device
    )

    def other(tensor: Tensor) -> Tensor:
        place = samples.at.get(tensor.data_ptr())
        if place is None:
            return tensor
        rows = order[place[0] : place[1]]
        is_input = tensor.shape[1:] == samples.x.shape[1:] and tensor.dtype == samples.x.dtype
        return samples.x[rows] if is_input else samples.y[rows].view(tensor.shape)

    inputs = change_leaves(lambda leaf: other(leaf) if isinstance(leaf, Tensor) else leaf)
    as_it_was, mixed = session.train(STEPS), session.train(STEPS, Intervention(inputs=inputs, constants=other))
    return (
        f"the last {len(mixed)} steps with their samples mixed: loss {_range(mixed)}; as they came: {_range(as_it_was)}"
    )


def _range(losses: Sequence[float]) -> str:
    return f"{course(losses)}, between {min(losses):.4g} and {max(losses):.4g}"


@trial("apart_from_evaluation")
def apart_from_evaluation(session: ReplaySession, ids: Sequence[int]) -> str:
    """The recorded step without the samples that the evaluation shares, measured by the loss of those samples."""
    size, own = session.size or 0, session.ids[0] if session.ids else None
    if own is None or len(own) != size or len(session.ids) != 1:
        raise NotTried("which samples this step had is not known")
    shared = [row for row, sample in enumerate(own) if sample in set(ids)]
    others = [row for row in range(size) if row not in set(shared)]
    if not shared or not others:
        raise NotTried("this step has none of the shared samples, or nothing else")
    results = []
    for intervention in (AS_IT_WAS, Intervention(rows=others)):
        with session.live():
            for _ in range(STEPS):
                session.replayer.run(session.recorded_step, intervention)
            results.append(session.replayer.run(session.recorded_step, Intervention(rows=shared), upto="forward").loss)
    return (
        f"after {STEPS} updates without the {len(shared)} shared samples of this batch their loss is {results[1]:.4g}; "
        f"trained on them: {results[0]:.4g}"
    )
