"""How good a trained model is: held-out data and correct code, which no mutant can touch.

Each judge takes the report of a run and returns numbers by name, the first of which is what counts: lower is better.
Under the same names as the program shows them they can be compared with what it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from zoo.hosts.corridor import Corridors
from zoo.hosts.report import Report
from zoo.hosts.worlds import (
    BEGIN,
    END,
    HELD_OUT,
    images,
    moons,
    new_task,
    pairs,
    patients,
    phrases,
    points,
    sentences,
    table,
)

Quality = Mapping[str, float]
Judge = Callable[[Report], Quality]


def _classified(logits: Tensor, y: Tensor) -> Quality:
    loss = -logits.log_softmax(-1).gather(1, y[:, None]).mean()
    return {"loss": loss.item(), "accuracy": (logits.argmax(1) == y).double().mean().item()}


def _tables(report: Report) -> Quality:
    x, level, y = table(HELD_OUT, 2000)
    return _classified(report.model((x - report.parts["mean"]) / report.parts["std"], level), y)


def _pictures(report: Report) -> Quality:
    x, y = images(HELD_OUT, 800)
    return _classified(report.model((x / 255 - 0.43) / 0.18), y)


def _language(report: Report) -> Quality:
    ids = sentences(HELD_OUT, 200)
    logits = torch.stack([report.model(ids[:, :t])[:, -1] for t in range(1, ids.shape[1])], 1)
    return _classified(logits.flatten(0, 1), ids[:, 1:].flatten())


def _gan(report: Report) -> Quality:
    real = points(HELD_OUT, 1000)
    made = report.model(torch.randn(1000, 6, generator=torch.Generator().manual_seed(0)))
    across, within = torch.cdist(made, real).mean(), (torch.cdist(made, made).mean() + torch.cdist(real, real).mean())
    return {"distance": (across - within / 2).item()}


def _contrast(report: Report) -> Quality:
    numbers = []
    for a, b in zip(*(each.split(64) for each in pairs(HELD_OUT, 1024))):
        scores = report.model(a, b)
        both = [_classified(each, torch.arange(64)) for each in (scores, scores.T)]
        numbers.append(((both[0]["loss"] + both[1]["loss"]) / 2, both[0]["accuracy"]))
    loss, accuracy = torch.tensor(numbers).mean(0).tolist()
    return {"loss": loss, "accuracy": accuracy}


def _policy(report: Report) -> Quality:
    corridors, total = Corridors(1000, HELD_OUT), torch.zeros(1000)
    seen, alive = corridors.reset(), torch.ones(1000)
    for _ in range(12):
        seen, reward, done = corridors.step(report.model(seen)[0].argmax(-1))
        total, alive = total + reward * alive, alive * (~done)
    return {"loss": -total.mean().item(), "reward": total.mean().item()}


def _lora(report: Report) -> Quality:
    x, y = new_task(HELD_OUT, 2000)
    return _classified(report.model(x), y)


def _diffusion(report: Report) -> Quality:
    x, draws = moons(HELD_OUT, 2000), torch.Generator().manual_seed(0)
    kept = torch.cumprod(1.0 - torch.linspace(1e-3, 0.15, 40), 0)
    t, noise = torch.arange(2000) % 40, torch.randn(2000, 2, generator=draws)
    noised = kept[t, None].sqrt() * x + (1 - kept[t, None]).sqrt() * noise
    return {"loss": (report.model(noised, t) - noise).square().mean().item()}


def _multitask(report: Report) -> Quality:
    x, kind, value = patients(HELD_OUT, 2000)
    logits, predicted = report.model(x)
    kind_loss, known = _classified(logits, kind)["loss"], ~value.isnan()
    value_loss = (predicted[known] - (value[known] - 20) / 8).square().mean().item()
    return {"loss": kind_loss + 2 * value_loss, "kind": kind_loss, "value": value_loss}


def _translate(report: Report) -> Quality:
    rights, logits = [], []
    for source, target in phrases(HELD_OUT, 300):
        given = torch.cat([torch.tensor([BEGIN]), target])
        logits.append(report.model(source[None], given[None])[0])
        rights.append(torch.cat([target, torch.tensor([END])]))
    return _classified(torch.cat(logits), torch.cat(rights))


JUDGES: dict[str, Judge] = {
    "tables": _tables,
    "pictures": _pictures,
    "language": _language,
    "gan": _gan,
    "contrast": _contrast,
    "policy": _policy,
    "lora": _lora,
    "diffusion": _diffusion,
    "multitask": _multitask,
    "translate": _translate,
}


@torch.no_grad()
def quality_of(host: str, report: Report) -> Quality:
    """What the model is worth; in evaluation mode, with float32 weights as they are."""
    report.model.eval()
    return JUDGES[host](report)
