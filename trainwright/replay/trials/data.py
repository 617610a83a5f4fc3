"""Remedies of data faults: recorded steps again, fed as they should have been."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright.recorder.program import mapped
from trainwright.replay.classified import classified
from trainwright.replay.replayer import AS_IT_WAS, Intervention
from trainwright.replay.samples import classes_of, pooled, standardised
from trainwright.replay.session import ReplaySession
from trainwright.replay.trials import NotTried, trial

STEPS = 12


def _course(losses: Sequence[float]) -> str:
    return f"{losses[0]:.4g} -> {losses[-1]:.4g}"


def _compared(bench: ReplaySession, what: str, edit: Intervention) -> str:
    as_it_was, then = bench.train(STEPS, repeat=True), bench.train(STEPS, edit, repeat=True)
    return f"loss of this batch in {STEPS} updates on it {what}: {_course(then)}; as it was: {_course(as_it_was)}"


@trial("standardised_inputs")
def standardised_inputs(bench: ReplaySession) -> str:
    """Inputs of mean 0 and deviation 1."""
    return _compared(bench, "with standardised inputs", Intervention(inputs=standardised))


@trial("varied_inputs")
def varied_inputs(bench: ReplaySession) -> str:
    """Other inputs for each sample, drawn at random: shows that model and loss are all right."""
    drawn: dict[int, Tensor] = {}
    generator = torch.Generator().manual_seed(0)

    def draw(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dim() < 2:
            return leaf
        if leaf.data_ptr() not in drawn:
            drawn[leaf.data_ptr()] = torch.randn(leaf.shape, generator=generator).to(leaf)
        return drawn[leaf.data_ptr()]

    edit = Intervention(inputs=lambda call, args, kwargs: (mapped(args, draw), mapped(kwargs, draw)))
    return _compared(bench, "with inputs that differ between samples (random)", edit)


@trial("without_column")
def without_column(bench: ReplaySession, column: int) -> str:
    """Zeros in one column of the input."""

    def blank(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dim() < 2 or leaf[0].numel() <= column:
            return leaf
        flat = leaf.flatten(1).clone()
        flat[:, column] = 0
        return flat.view(leaf.shape)

    edit = Intervention(inputs=lambda call, args, kwargs: (mapped(args, blank), mapped(kwargs, blank)))
    return _compared(bench, f"without column {column}", edit)


@trial("ignore_padding")
def ignore_padding(bench: ReplaySession, pad: int) -> str:
    """``ignore_index`` in the loss; judged by the loss of the targets that are no padding."""
    known: list[list[float]] = [[], []]

    def ignoring(which: int) -> Callable[..., Any]:
        def around(function: Any, args: Any, kwargs: Any) -> Any:
            one = classified(getattr(function, "__name__", ""), args, kwargs)
            if one is None:
                return function(*args, **kwargs)
            better = {**kwargs, "ignore_index": pad}
            with torch.no_grad():
                counted = int((one.target != pad).sum()) if one.is_sum else 1
                known[which].append(float(function(*args, **better)) / max(1, counted))
            return function(*args, **(better if which else kwargs))

        return around

    for which in (0, 1):
        bench.train(STEPS, Intervention(ops=ignoring(which)), repeat=True)
    if not known[1]:
        raise NotTried("the loss is not a cross-entropy")
    return (
        f"loss of real tokens in {STEPS} updates with ignore_index={pad}: {_course(known[1])}; "
        f"as it was: {_course(known[0])}"
    )


@trial("mixed_samples")
def mixed_samples(bench: ReplaySession) -> str:
    """The recorded samples in another order, in the same steps."""
    target = classes_of(bench)[1]
    samples = None if target is None else pooled(bench, target)
    if samples is None or len(samples.at) < 4:
        raise NotTried("no two recorded steps have samples of the same kind")
    order = torch.randperm(len(samples.y), generator=torch.Generator().manual_seed(0)).to(samples.y.device)

    def other(leaf: Any) -> Any:
        place = samples.at.get(leaf.data_ptr()) if isinstance(leaf, Tensor) else None
        if place is None:
            return leaf
        rows = order[place[0] : place[1]]
        chosen = samples.x[rows] if leaf.shape[1:] == samples.x.shape[1:] and leaf.dtype == samples.x.dtype else None
        return chosen if chosen is not None else samples.y[rows].view(leaf.shape)

    edit = Intervention(
        inputs=lambda call, args, kwargs: (mapped(args, other), mapped(kwargs, other)),
        constants=lambda tensor: other(tensor),
    )
    as_it_was, mixed = bench.train(STEPS), bench.train(STEPS, edit)
    return (
        f"the last {len(mixed)} steps with their samples mixed: loss {_told(mixed)}; as they came: {_told(as_it_was)}"
    )


def _told(losses: Sequence[float]) -> str:
    return f"{_course(losses)}, between {min(losses):.4g} and {max(losses):.4g}"


@trial("apart_from_evaluation")
def apart_from_evaluation(bench: ReplaySession, ids: Sequence[int]) -> str:
    """The recorded step without the samples that the evaluation shares; judged by the loss of those samples."""
    size, own = bench.size or 0, bench.ids[0] if bench.ids else None
    if own is None or len(own) != size or len(bench.ids) != 1:
        raise NotTried("which samples this step had is not known")
    shared = [row for row, sample in enumerate(own) if sample in set(ids)]
    kept = [row for row in range(size) if row not in set(shared)]
    if not shared or not kept:
        raise NotTried("this step has none of the shared samples, or nothing else")
    results = []
    for edit in (AS_IT_WAS, Intervention(rows=kept)):
        with bench.live():
            for _ in range(STEPS):
                bench.player.play(bench.segment, edit)
            results.append(bench.player.play(bench.segment, Intervention(rows=shared), upto="forward").loss)
    return (
        f"after {STEPS} updates without the {len(shared)} shared samples of this batch their loss is {results[1]:.4g}; "
        f"trained on them: {results[0]:.4g}"
    )
