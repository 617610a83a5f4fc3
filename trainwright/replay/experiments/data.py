"""What a recorded step was fed: how its inputs are spread, what they say about the targets, whether padding counts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trainwright.recorder.program import tensors_of
from trainwright.replay.experiments import experiment
from trainwright.replay.replayer import Intervention, NotReplayable
from trainwright.replay.samples import (
    classes_of,
    inputs_of,
    judged,
    pooled,
    standardised,
)
from trainwright.replay.session import ReplaySession

MOST_ROWS, MOST_COLUMNS, MOST_JUDGED = 256, 16384, 1024
TAIL = 2
"""Places that a row must end with to count as filled up."""


@experiment("batch", when="checkup")
def batch(bench: ReplaySession) -> dict[str, Any]:
    """The spread of what the model was given, the classes, and columns that say the class all by themselves."""
    inputs = inputs_of(bench.segment)
    told: dict[str, Any] = {"inputs": [_spread(x) for x in inputs], "pad": None, "leaks": []}
    told["losses"] = [float(each) for each in bench.segment.losses]
    if not inputs:
        return told | {"classes": None}
    found = judged(bench)
    wanted = found[0] if found else None
    told["loss"] = wanted.name if wanted else None
    told["targets_vary"] = bool(wanted and not _is_constant(wanted.target))
    ids = next((x for x in inputs if not x.is_floating_point() and x.dim() == 2 and x.dtype != torch.bool), None)
    told["pad"] = None if ids is None else padding(ids)
    told["classes"] = wanted.classes if wanted else None
    if wanted is not None and wanted.target.numel() == len(inputs[0]):
        told |= _about_targets(bench, inputs[0], wanted.target)
    return told


def _about_targets(bench: ReplaySession, x: Tensor, target: Tensor) -> dict[str, Any]:
    samples = pooled(bench, target) if len(target) < MOST_ROWS else None
    x, y = (x, target.flatten()) if samples is None else (samples.x, samples.y)
    told: dict[str, Any] = {"samples": len(y)}
    if not y.is_floating_point() or torch.unique(y).numel() <= min(64, len(y) // 8):
        told["entropy"] = entropy(y)
    if x.is_floating_point() and x[0].numel() <= MOST_COLUMNS:
        told["leaks"] = leaks(x[: 4 * MOST_ROWS], y[: 4 * MOST_ROWS])
    return told


def _spread(x: Tensor) -> dict[str, Any]:
    told: dict[str, Any] = {"shape": list(x.shape), "float": x.is_floating_point(), "constant": _is_constant(x)}
    if x.is_floating_point() and x.numel():
        rows = (
            x[:MOST_ROWS].flatten(1)[:, :: max(1, x[0].numel() // MOST_COLUMNS)].double() if x.dim() > 1 else x.double()
        )
        mean, std = float(rows.mean()), float(rows.std(correction=0))
        told |= {"mean": mean, "std": std, "absmax": float(rows.abs().max())}
        told["whole"] = bool((rows == rows.round()).all())
    return told


def _is_constant(x: Tensor) -> bool:
    """Every sample is the same; one sample alone says nothing."""
    return len(x) > 1 and bool((x == x[:1]).all()) if x.dim() else False


def entropy(y: Tensor) -> float:
    """Of the values of ``y``, in nats: the loss of whoever knows nothing but how often each occurs."""
    p = torch.unique(y, return_counts=True)[1].double() / y.numel()
    return float(-(p * p.log()).sum())


def leaks(x: Tensor, y: Tensor) -> list[dict[str, Any]]:
    """Columns of ``x`` that are constant within each class and differ between classes, or are ``y`` itself.

    ``within`` is the share of a column's variance that is left within the classes. A class that has fewer than three
    samples is left out: with so few, a rare feature fits by chance.
    """
    columns = x.flatten(1).double()
    values, classes, counts = torch.unique(y, return_inverse=True, return_counts=True)
    if len(values) > len(y) // 3:
        return _copies(columns, y)
    keep = counts[classes] >= 3
    columns, classes = columns[keep], classes[keep]
    enough = int((counts >= 3).sum())
    if enough < 2 or len(columns) - enough < 16:
        return []
    hot = F.one_hot(classes, len(values)).double()
    means = (hot.T @ columns) / counts[:, None].clamp(min=1)
    within = (columns - means[classes]).square().mean(0)
    total = columns.var(0, correction=0)
    share = torch.where(total > 0, within / total.clamp(min=1e-300), torch.ones_like(total))
    return [{"column": int(i), "within": float(share[i]), "samples": len(columns)} for i in _smallest(share, 1e-4)]


def _copies(columns: Tensor, y: Tensor) -> list[dict[str, Any]]:
    """Of a target that is a number: columns that follow it on a line, if there are others."""
    if columns.shape[1] < 2 or len(y) < 16:
        return []
    a, b = columns - columns.mean(0), (y.double() - y.double().mean())[:, None]
    norm = a.square().sum(0) * b.square().sum()
    left = torch.where(norm > 0, 1 - (a * b).sum(0).square() / norm.clamp(min=1e-300), torch.ones_like(norm))
    return [{"column": int(i), "within": float(left[i]), "samples": len(y)} for i in _smallest(left, 1e-8)]


def _smallest(share: Tensor, at_most: float) -> list[int]:
    order = share.argsort()[:8].tolist()
    return [i for i in order if share[i] <= at_most]


def padding(ids: Tensor) -> dict[str, Any] | None:
    """The id that fills rows up, at their end or start: in many, of different length, and hardly elsewhere."""
    for side in ("end", "start"):
        rows = ids if side == "end" else ids.flip(1)
        value = rows[:, -1].mode().values
        lengths = (rows.flip(1) == value).cumprod(1).sum(1)
        filled = lengths >= TAIL
        inside = int((rows == value).sum()) - int(lengths.sum())
        if filled.double().mean() >= 0.2 and inside <= 0.02 * rows.numel() and len(torch.unique(lengths[filled])) > 1:
            share = float(lengths.sum()) / rows.numel()
            return {"id": int(value), "side": side, "rows": float(filled.double().mean()), "share": share}
    return None


@experiment("padding_in_loss", when="asked")
def padding_in_loss(bench: ReplaySession) -> dict[str, Any]:
    """The gradient of the loss at outputs deep within the padding: exactly 0 where the loss leaves it out.

    An output is deep within it if its own place and both places beside it are padding: however targets are shifted.
    """
    ids = next(x for x in inputs_of(bench.segment) if not x.is_floating_point() and x.dim() == 2)
    found = padding(ids)
    if found is None:
        raise NotReplayable("this step has no padding")
    is_pad = ids == found["id"]
    deep = is_pad & is_pad.roll(1, 1) & is_pad.roll(-1, 1)
    deep[:, 0] = deep[:, -1] = False
    kept: list[Tensor] = []

    def keep(root: Any, args: Any, output: Any) -> None:
        for tensor in tensors_of(output):
            if tensor.requires_grad and tensor.dim() == 3 and tensor.shape[:2] == ids.shape:
                tensor.retain_grad()
                kept.append(tensor)

    @contextmanager
    def hooked() -> Iterator[None]:
        handles = [root.register_forward_hook(keep) for root in bench.roots]
        yield
        for handle in handles:
            handle.remove()

    bench.run(Intervention(model=hooked))
    grads = [tensor.grad for tensor in kept if tensor.grad is not None]
    if not grads or not bool(deep.any()):
        raise NotReplayable("the model has no output for each place, or no row has enough padding")
    norms = grads[0].detach().double().norm(dim=-1)
    return {**found, "at_padding": float(norms[deep].mean()), "elsewhere": float(norms[~is_pad].mean())}


@experiment("standardised", when="asked")
def standardised_inputs(bench: ReplaySession) -> dict[str, Any]:
    """The loss of this step, and after a few updates on it alone: as it was, and with inputs of mean 0, deviation 1."""
    as_it_was, with_it = bench.train(12, repeat=True), bench.train(12, Intervention(inputs=standardised), repeat=True)
    return {"as_it_was": as_it_was, "standardised": with_it}


@experiment("label_signal", when="asked")
def label_signal(bench: ReplaySession) -> dict[str, Any]:
    """Whether inputs say anything about labels: plain learners, judged on recorded samples that they did not see.

    ``memorised``: the losses of the model when it is given this batch again and again. ``deviations``: by how much the
    best of them is above chance.
    """
    classes, target = classes_of(bench)
    samples = None if target is None else pooled(bench, target)
    if samples is None or classes is None:
        raise NotReplayable("the samples of this step have no one label each")
    finite = samples.x.flatten(1).isfinite().all(1)
    x, y = _features(samples.x[finite]), samples.y[finite]
    x, y = x[:MOST_JUDGED], y[:MOST_JUDGED]
    if len(y) < 4 * classes:
        raise NotReplayable("too few of the recorded samples are finite")
    return {
        "samples": len(y),
        "classes": len(torch.unique(y)),
        "entropy": entropy(y),
        "deviations": _told_of(x, y, classes),
        "memorised": bench.train(48, repeat=True),
    }


def _features(x: Tensor) -> Tensor:
    """Rows of at most 512 standardised numbers; of token ids how often each occurs, and the first and the last."""
    if not x.is_floating_point():
        top = int(x.max()) + 1
        if x.dim() != 2 or top > 4096:
            raise NotReplayable("inputs of this kind are not looked at")
        hot = F.one_hot(x, top).double()
        x = torch.cat([hot.sum(1), hot[:, 0], hot[:, -1]], 1)
    x = x.flatten(1).double()
    x = (x - x.mean(0)) / x.std(0).clamp(min=1e-9)
    if x.shape[1] > 512:
        mix = torch.randn(x.shape[1], 512, dtype=x.dtype, generator=torch.Generator().manual_seed(0))
        x = x @ mix.to(x.device) / math.sqrt(x.shape[1])
    return x


def _told_of(x: Tensor, y: Tensor, classes: int) -> float:
    """How well scores for samples held out in turn, a quarter at a time, follow their classes.

    In standard deviations of chance: the correlations of each class's score with being of it, taken together. The best
    of a linear map, one with all products of two columns (both as kernel ridge regressions), and the nearest samples.
    """
    fold = torch.arange(len(y), device=y.device) % 4
    truth = F.one_hot(y, classes).double()
    linear = x @ x.T / x.shape[1]
    learners = {"linear": linear, "products": (1 + linear).square(), "near": -torch.cdist(x, x)}
    return max(_followed(name, kernel, truth.clone(), fold) for name, kernel in learners.items())


def _followed(learner: str, kernel: Tensor, truth: Tensor, fold: Tensor) -> float:
    scores = torch.zeros_like(truth)
    for held_out in range(4):
        seen, new = fold != held_out, fold == held_out
        centred = truth[seen] - truth[seen].mean(0)
        if learner == "near":
            scores[new] = centred[kernel[new][:, seen].topk(9).indices].mean(1)
        else:
            own = kernel[seen][:, seen]
            ridge = own.diagonal().mean() * torch.eye(len(own), dtype=own.dtype, device=own.device)
            scores[new] = kernel[new][:, seen] @ torch.linalg.solve(own + ridge, centred)
    for held_out in range(4):
        new = fold == held_out
        scores[new] -= scores[new].mean(0)
        truth[new] -= truth[new].mean(0)
    norms = scores.norm(dim=0) * truth.norm(dim=0)
    r = ((scores * truth).sum(0) / norms.clamp(min=1e-12))[norms > 1e-12]
    return float(r.sum() * math.sqrt(len(truth) / max(1, len(r))))
