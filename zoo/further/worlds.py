"""Where the further hosts get their raw data from, and the truth behind it for their judges."""

from __future__ import annotations

import torch
from torch import Tensor

ITEMS, USERS, NODES = 60, 160, 400


def _draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(7_919 * (seed + 1))


def _fixed() -> torch.Generator:
    """For what is the same in every run: the tastes, the templates, the classes."""
    return torch.Generator().manual_seed(3)


def blobs(seed: int, n: int) -> tuple[Tensor, Tensor]:
    """Grey pictures (n, 1, 16, 16) in 0..255 and masks (n, 16, 16) of bright ellipses."""
    g = _draws(seed)
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    centre, radius = 3 + 10 * torch.rand(n, 2, generator=g), 2 + 2.5 * torch.rand(n, 2, generator=g)
    down, across = (y - centre[:, :1, None]) / radius[:, :1, None], (x - centre[:, 1:, None]) / radius[:, 1:, None]
    mask = (down**2 + across**2 < 1).float()
    light = 70 + 60 * torch.rand(n, 1, 1, generator=g)
    picture = light + 45 * mask + 25 * torch.randn(n, 16, 16, generator=g)
    return picture.clamp(0, 255).unsqueeze(1), mask


def tastes(seed: int) -> list[list[int]]:
    """What each of USERS liked, in the order of time: 8 to 15 of ITEMS."""
    g, found = _draws(seed), []
    for likely in likings():
        count = int(torch.randint(8, 16, (1,), generator=g))
        found.append(torch.multinomial(likely, count, generator=g).tolist())
    return found


def likings() -> Tensor:
    """How likely each user (USERS, ITEMS) is to like an item, the same in every run."""
    fixed = _fixed()
    items = torch.randn(ITEMS, 4, generator=fixed)
    users = torch.randn(USERS, 4, generator=fixed)
    popular = torch.randn(ITEMS, generator=fixed)
    return (1.6 * users @ items.T + 0.5 * popular).softmax(1)


def loads(seed: int, n: int) -> Tensor:
    """Series (n, 200) of a load by the hour: a day of 12, a trend, noise that is remembered."""
    g = _draws(seed)
    t = torch.arange(200.0)
    phase, size = 6.28 * torch.rand(n, 1, generator=g), 5 + 10 * torch.rand(n, 1, generator=g)
    level, trend = 50 + 40 * torch.rand(n, 1, generator=g), 0.05 * torch.randn(n, 1, generator=g)
    noise, kept = torch.zeros(n, 200), torch.zeros(n)
    for i in range(200):
        kept = 0.7 * kept + torch.randn(n, generator=g)
        noise[:, i] = kept
    wave = (6.28 * t / 12 + phase).sin() + 0.4 * (12.56 * t / 12 + 2 * phase).cos()
    return level + size * wave + trend * t + noise


def letters(seed: int, n: int) -> Tensor:
    """Binary pictures (n, 64): noisy unions of some of ten templates."""
    fixed, g = _fixed(), _draws(seed)
    templates = (torch.rand(10, 64, generator=fixed) < 0.25).float()
    chosen = torch.rand(n, 10, generator=g) < 0.25
    strength = 0.9 * (chosen.float() @ templates).clamp(max=1) + 0.05
    return (torch.rand(n, 64, generator=g) < strength).float()


def citations(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features (NODES, 12), edges (2, m) both ways, four classes (NODES,), and a random order of the nodes."""
    fixed, g = _fixed(), _draws(seed)
    y = torch.randint(4, (NODES,), generator=g)
    x = torch.randn(4, 12, generator=fixed)[y] * 0.45 + torch.randn(NODES, 12, generator=g)
    alike = y[:, None] == y[None, :]
    p = torch.where(alike, 0.025, 0.004)
    edges = (torch.rand(NODES, NODES, generator=g) < p).triu(1).nonzero().T
    return x, torch.cat([edges, edges.flip(0)], 1), y, torch.randperm(NODES, generator=g)
