"""The mean and the deviation of each feature of the inputs, over the steps that are held."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainwright.doctor.data.facts import Feature, FeaturesFacts, StandardisedFacts
from trainwright.recorder.plain_tensors import plain
from trainwright.replay.experiments import experiment
from trainwright.replay.replayer import Intervention
from trainwright.replay.samples import inputs_of, standardised
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts, strict

MOST_ROWS, MOST_FEATURES = 512, 1024
STEPS = 32
"""That are run again with standardised inputs."""


@experiment(FeaturesFacts.experiment, when="checkup", steps=0.0)
def features(session: ReplaySession) -> Facts:
    """Of the first floating-point input: columns of tables, channels of images, features of sequences."""
    parts: list[Tensor] = []
    for recorded in reversed(session.recorded_steps[-16:]):
        x = columns_of(inputs_of(recorded))
        if x is None or (parts and x.shape[1] != parts[0].shape[1]):
            continue
        parts.append(x)
        if sum(map(len, parts)) >= MOST_ROWS:
            break
    if not parts:
        return dict(strict(vars(FeaturesFacts())))
    return dict(strict(vars(_facts(torch.cat(parts)[:MOST_ROWS].double()))))


def columns_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """The first floating-point input as (rows, features). Pixels and positions are rows as well: some of a sample."""
    x = next((each.detach() for each in plain(tensors) if each.is_floating_point() and each.dim() > 1), None)
    if x is None or not x.numel():
        return None
    if x.dim() == 4 or x.dim() == 5:
        x = x.flatten(2)[:, :, :: max(1, x[0, 0].numel() // 16)].transpose(1, 2).flatten(0, 1)
    elif x.dim() == 3:
        x = x[:, :: max(1, x.shape[1] // 16)].flatten(0, 1)
    return x[:, :MOST_FEATURES] if x.dim() == 2 else None


def _facts(x: Tensor) -> FeaturesFacts:
    mean, std = x.mean(0), x.std(0, correction=0)
    varies = std > 1e-6 * x.abs().amax(0).clamp(min=1e-300)
    usual = float(std[varies].median()) if bool(varies.any()) else 0.0
    return FeaturesFacts(
        rows=len(x),
        features=x.shape[1],
        constant=int((~varies).sum()),
        rms=float(x.square().mean().sqrt()),
        usual=usual,
        largest=_feature(mean, std, int(std.argmax())) if usual else None,
        smallest=_feature(mean, std, int(torch.where(varies, std, torch.inf).argmin())) if usual else None,
        farthest=_feature(mean, std, int(torch.where(varies, mean.abs() / std, 0.0).argmax())) if usual else None,
    )


def _feature(mean: Tensor, std: Tensor, number: int) -> Feature:
    return Feature(number=number, mean=float(mean[number]), std=float(std[number]))


@experiment(StandardisedFacts.experiment, when="requested", steps=70.0)
def standardised_steps(session: ReplaySession) -> Facts:
    """Runs the steps that are held again with inputs that are standardised in each batch."""
    was, now = session.train(STEPS), session.train(STEPS, Intervention(inputs=standardised))
    return dict(strict(vars(StandardisedFacts(as_it_was=tuple(was), standardised=tuple(now)))))
