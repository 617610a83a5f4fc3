"""What a recorded step was fed: how its inputs are spread, what they say about the targets, whether padding counts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trainwright.observe.program import tensors_of
from trainwright.replay.bench import Bench
from trainwright.replay.experiments import experiment
from trainwright.replay.play import Edit, NotReplayable
from trainwright.replay.samples import (
    CLASSIFYING,
    classes_of,
    inputs_of,
    judged,
    pooled,
    standardised,
)

MOST_ROWS, MOST_COLUMNS = 256, 16384
TAIL = 2
"""Places that a row must end with to count as filled up."""


@experiment("batch", when="checkup")
def batch(bench: Bench) -> dict[str, Any]:
    """The spread of what the model was given, the classes, and columns that say the class all by themselves."""
    inputs = inputs_of(bench.segment)
    told: dict[str, Any] = {"inputs": [_spread(x) for x in inputs], "pad": None, "leaks": [], "classes": None}
    told["losses"] = [float(each) for each in bench.segment.losses]
    if not inputs:
        return told
    found = judged(bench)
    wanted = found[0] if found else None
    told["loss"] = wanted.name if wanted else None
    told["targets_vary"] = bool(wanted and not _is_constant(wanted.target))
    ids = next((x for x in inputs if not x.is_floating_point() and x.dim() == 2 and x.dtype != torch.bool), None)
    told["pad"] = None if ids is None else padding(ids)
    if wanted is not None and wanted.name in CLASSIFYING and wanted.prediction.dim() > 1:
        told["classes"] = int(wanted.prediction.shape[1])
    if wanted is not None and wanted.target.numel() == len(inputs[0]):
        told |= _about_targets(bench, inputs[0], wanted.target)
    return told


def _about_targets(bench: Bench, x: Tensor, target: Tensor) -> dict[str, Any]:
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
def padding_in_loss(bench: Bench) -> dict[str, Any]:
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

    handles = [root.register_forward_hook(keep) for root in bench.roots]
    try:
        bench.run()
    finally:
        for handle in handles:
            handle.remove()
    grads = [tensor.grad for tensor in kept if tensor.grad is not None]
    if not grads or not bool(deep.any()):
        raise NotReplayable("the model has no output for each place, or no row has enough padding")
    norms = grads[0].detach().double().norm(dim=-1)
    return {**found, "at_padding": float(norms[deep].mean()), "elsewhere": float(norms[~is_pad].mean())}


@experiment("standardised", when="asked")
def standardised_inputs(bench: Bench) -> dict[str, Any]:
    """The loss of this step, and after a few updates on it alone: as it was, and with inputs of mean 0, deviation 1."""
    as_it_was, with_it = bench.train(12, repeat=True), bench.train(12, Edit(inputs=standardised), repeat=True)
    return {"as_it_was": as_it_was, "standardised": with_it}


@experiment("label_signal", when="asked")
def label_signal(bench: Bench) -> dict[str, Any]:
    """Whether inputs say anything about labels: two plain learners, judged on recorded samples that they did not see.

    ``memorised``: the losses of the model when it is given this batch again and again. ``right`` is the better of a
    linear classifier and the nearest neighbours; ``majority`` what always naming the most frequent class would give.
    """
    classes, target = classes_of(bench)
    samples = None if target is None else pooled(bench, target)
    if samples is None or classes is None:
        raise NotReplayable("the samples of this step have no one label each")
    finite = samples.x.flatten(1).isfinite().all(1)
    x, y = _features(samples.x[finite]), samples.y[finite]
    if len(y) < 4 * classes:
        raise NotReplayable("too few of the recorded samples are finite")
    right = max(_cross_validated(x, y, classes, linear) for linear in (True, False))
    majority = int(y.bincount().max()) / len(y)
    chance = math.sqrt(max(majority * (1 - majority), 1e-9) / len(y))
    return {
        "samples": len(y),
        "classes": len(torch.unique(y)),
        "entropy": entropy(y),
        "right": right,
        "majority": majority,
        "deviations": (right - majority) / chance,
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


def _cross_validated(x: Tensor, y: Tensor, classes: int, linear: bool) -> float:
    """The share that is right of samples held out in turn, a quarter at a time."""
    fold = torch.arange(len(y), device=y.device) % 4
    hot = F.one_hot(y, classes).double()
    right = 0
    for held_out in range(4):
        seen, new = fold != held_out, fold == held_out
        if linear:
            gram = x[seen].T @ x[seen] + len(y) * 0.1 * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
            scores = x[new] @ torch.linalg.solve(gram, x[seen].T @ (hot[seen] - hot[seen].mean(0))) + hot[seen].mean(0)
        else:
            near = torch.cdist(x[new], x[seen]).topk(min(9, int(seen.sum())), largest=False).indices
            scores = hot[seen][near].mean(1)
        right += int((scores.argmax(1) == y[new]).sum())
    return right / len(y)
