"""Where the hosts get their raw data from. Mutants cannot touch it, and the judges draw their held-out data here."""

from __future__ import annotations

import torch
from torch import Tensor, nn

HELD_OUT = 9_999
"""The seed of what no program sees."""
CLASSES, LEVELS, TOKENS = 4, 6, 16
PAD, BEGIN, END = 0, 1, 2
MODES = torch.tensor([[1.0, 0.0], [-0.5, 0.866], [-0.5, -0.866]])


def _draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(7_919 * (seed + 1))


def _fixed() -> torch.Generator:
    """For what is the same in every run: the teacher, the patterns, the grammar."""
    return torch.Generator().manual_seed(3)


def table(seed: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Eight columns of very different units (n, 8), a column of LEVELS categories (n,), a class of CLASSES (n,)."""
    fixed, g = _fixed(), _draws(seed)
    scale, offset = 10 ** (3 * torch.rand(8, generator=fixed) - 1), 5 * torch.randn(8, generator=fixed)
    weight, per_level = torch.randn(8, 16, generator=fixed), torch.randn(LEVELS, 16, generator=fixed)
    head = torch.randn(16, CLASSES, generator=fixed)
    plain, level = torch.randn(n, 8, generator=g), torch.randint(LEVELS, (n,), generator=g)
    logits = 1.5 * (plain @ weight + 2 * per_level[level]).tanh() @ head
    return (plain + offset) * scale, level, torch.multinomial(logits.softmax(1), 1, generator=g).squeeze(1)


def images(seed: int, n: int) -> tuple[Tensor, Tensor]:
    """Grey images (n, 1, 10, 10) in 0..255 of CLASSES patterns at a random place, and the class (n,)."""
    fixed, g = _fixed(), _draws(seed)
    patterns = torch.randn(CLASSES, 6, 6, generator=fixed)
    y, noise = torch.randint(CLASSES, (n,), generator=g), torch.randn(n, 10, 10, generator=g)
    corner = torch.randint(5, (n, 2), generator=g)
    rows = corner[:, :1] + torch.arange(6)
    columns = corner[:, 1:] + torch.arange(6)
    picture = 0.6 * noise
    picture[torch.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]] += patterns[y]
    return (picture * 40 + 110).clamp(0, 255).unsqueeze(1), y


def sentences(seed: int, n: int, length: int = 16) -> Tensor:
    """Token ids (n, length): the next one depends on the last two, and is random one time in ten."""
    fixed, g = _fixed(), _draws(seed)
    after = torch.stack([torch.randperm(TOKENS, generator=fixed) for _ in range(2)])
    ids = torch.randint(TOKENS, (n, length), generator=g)
    surprise = torch.rand(n, length, generator=g) < 0.1
    for t in range(2, length):
        ids[:, t] = torch.where(surprise[:, t], ids[:, t], after[ids[:, t - 2] % 2, ids[:, t - 1]])
    return ids


def points(seed: int, n: int) -> Tensor:
    """Points in the plane (n, 2) around the three MODES."""
    g = _draws(seed)
    return MODES[torch.randint(len(MODES), (n,), generator=g)] + 0.12 * torch.randn(n, 2, generator=g)


def moons(seed: int, n: int) -> Tensor:
    """Points (n, 2) on two half circles, of about unit variance."""
    g = _draws(seed)
    angle, upper = torch.pi * torch.rand(n, generator=g), torch.rand(n, generator=g) < 0.5
    x = torch.where(upper, angle.cos(), 1 - angle.cos()) - 0.5
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin()) - 0.25
    return torch.stack([1.15 * x, 2.0 * y], 1) + 0.05 * torch.randn(n, 2, generator=g)


def pairs(seed: int, n: int) -> tuple[Tensor, Tensor]:
    """Two descriptions (n, 24), (n, 20) of the same n things, by different senses and with noise of their own."""
    fixed, g = _fixed(), _draws(seed)
    one, two = torch.randn(8, 24, generator=fixed), torch.randn(8, 20, generator=fixed)
    thing = torch.randn(n, 8, generator=g)
    first, second = (thing @ one / 2).tanh(), (thing @ two / 2).tanh()
    return first + 0.25 * torch.randn(n, 24, generator=g), second + 0.25 * torch.randn(n, 20, generator=g)


def pretrained() -> nn.Sequential:
    """A network with weights that somebody has trained."""
    fixed = _fixed()
    model = nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, CLASSES))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=fixed) * (1.5 / p.shape[-1] ** 0.5 if p.dim() > 1 else 0.1))
    return model


def new_task(seed: int, n: int) -> tuple[Tensor, Tensor]:
    """Inputs (n, 12) and classes (n,) of a task that differs from what ``pretrained`` does by a change of low rank."""
    fixed, g, teacher = _draws(5), _draws(seed), pretrained()
    with torch.no_grad():
        for layer in (teacher[0], teacher[2]):
            out, into = layer.weight.shape
            layer.weight += torch.randn(out, 2, generator=fixed) @ torch.randn(2, into, generator=fixed) / into**0.5
        x = torch.randn(n, 12, generator=g)
        return x, torch.multinomial((3 * teacher(x)).softmax(1), 1, generator=g).squeeze(1)


def patients(seed: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs (n, 10), a class of three (n,), and a value (n,) that is NaN where nobody has measured it."""
    fixed, g = _fixed(), _draws(seed)
    first, second = torch.randn(10, 12, generator=fixed), torch.randn(12, 4, generator=fixed)
    x = torch.randn(n, 10, generator=g)
    out = (x @ first / 2).tanh() @ second
    kind = torch.multinomial((1.5 * out[:, :3]).softmax(1), 1, generator=g).squeeze(1)
    value = 20 + 6 * out[:, 3] + 2 * torch.randn(n, generator=g)
    return x, kind, value.masked_fill(torch.rand(n, generator=g) < 0.25, torch.nan)


def phrases(seed: int, n: int) -> list[tuple[Tensor, Tensor]]:
    """Pairs of phrases: a source of 3 to 7 ids, and its translation, word by word."""
    fixed, g = _fixed(), _draws(seed)
    meaning = 3 + torch.randperm(TOKENS - 3, generator=fixed)
    lengths = torch.randint(3, 8, (n,), generator=g).tolist()
    sources = [torch.randint(3, TOKENS, (length,), generator=g) for length in lengths]
    return [(source, meaning[source - 3]) for source in sources]
