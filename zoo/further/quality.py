"""What the models of the further hosts are worth, as ``zoo.hosts.quality`` says of the ten: the first number judges."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.further.worlds import ITEMS, NODES, USERS, blobs, citations, letters, likings, loads
from zoo.hosts.quality import Judge, Quality
from zoo.hosts.report import Report
from zoo.hosts.worlds import HELD_OUT


def _segment(report: Report) -> Quality:
    x, mask = blobs(HELD_OUT, 200)
    logits = report.model((x / 255 - 0.4) / 0.15)
    p, q = logits.sigmoid().flatten(1), mask.flatten(1)
    dice = (1 - (2 * (p * q).sum(1) + 1) / (p.sum(1) + q.sum(1) + 1)).mean()
    loss = F.binary_cross_entropy(logits.sigmoid().double(), mask.double()) + dice
    found, wanted = logits > 0, mask > 0.5
    return {"loss": loss.item(), "iou": ((found & wanted).sum() / (found | wanted).sum()).item()}


def _recommend(report: Report) -> Quality:
    seen = report.parts["seen"]
    likely = likings().masked_fill(seen, 0)
    likely = likely / likely.sum(1, keepdim=True)
    scores = report.model(torch.arange(USERS), torch.arange(ITEMS).expand(USERS, -1)).masked_fill(seen, -torch.inf)
    hits = likely.gather(1, scores.argsort(1, descending=True)[:, :10])
    gain = (hits / torch.log2(torch.arange(10) + 2.0)).sum(1).mean().item()
    return {"loss": -gain, "hit_rate": hits.sum(1).mean().item(), "ndcg": gain}


def _forecast(report: Report) -> Quality:
    series = loads(HELD_OUT, 100)
    windows = torch.cat([series[:, start : start + 30] for start in (150, 157, 164)])
    past, future = windows[:, :24], windows[:, 24:]
    mean, std = past.mean(1, keepdim=True), past.std(1, keepdim=True) + 1e-3
    scaled = (windows - mean) / std
    teacher = F.smooth_l1_loss(report.model(scaled[:, :-1]), scaled[:, 1:]).item()
    known = scaled[:, :24]
    for _ in range(6):
        known = torch.cat([known, report.model(known)[:, -1:]], 1)
    error = (known[:, 24:] * std + mean - future).abs().mean().item()
    return {"loss": error, "mae": error, "teacher": teacher}


def _vae(report: Report) -> Quality:
    x = letters(HELD_OUT, 800)
    torch.manual_seed(0)
    mean, log_var = report.model.encode(x)
    z = mean + (log_var / 2).exp() * torch.randn_like(mean)
    misfit = F.binary_cross_entropy_with_logits(report.model.decoder(z), x, reduction="none").sum(1).mean()
    kl = 0.5 * (mean**2 + log_var.exp() - 1 - log_var).sum(1).mean()
    right = ((report.model.decoder(mean) > 0) == (x > 0.5)).float().mean()
    return {"loss": (misfit + kl).item(), "right": right.item()}


def _graph(report: Report) -> Quality:
    losses, accuracies = [], []
    for seed in range(HELD_OUT, HELD_OUT + 3):
        x, edges, y, _ = citations(seed)
        matrix = torch.eye(NODES)
        matrix[edges[0], edges[1]] = 1
        degree = matrix.sum(1)
        logits: Tensor = report.model(x, matrix / (degree[:, None] * degree[None]).sqrt())
        losses.append(F.cross_entropy(logits, y).item())
        accuracies.append((logits.argmax(1) == y).double().mean().item())
    return {"loss": sum(losses) / 3, "accuracy": sum(accuracies) / 3}


JUDGES: dict[str, Judge] = {
    "segment": _segment,
    "recommend": _recommend,
    "forecast": _forecast,
    "vae": _vae,
    "graph": _graph,
}


@torch.no_grad()
def quality_of(host: str, report: Report) -> Quality:
    """What the model is worth; in evaluation mode."""
    report.model.eval()
    return JUDGES[host](report)
