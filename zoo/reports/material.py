"""Small data sets for the programs, drawn from a seed. The text is the help topics that come with Python."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor


def labelled_rows(
    count: int, seed: int, *, features: int = 20, classes: int = 10, noise: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Normal features (count, features) and their classes (count,) by a noisy linear teacher."""
    g = torch.Generator().manual_seed(1000 + seed)
    teacher = torch.randn(features, classes, generator=g)
    x = torch.randn(count, features, generator=g)
    return x, (x @ teacher + noise * torch.randn(count, classes, generator=g)).argmax(1)


def labelled_pictures(
    count: int, seed: int, *, classes: int = 10, size: int = 12, noise: float = 0.6
) -> tuple[Tensor, Tensor]:
    """Images (count, 1, size, size), each the smooth prototype of its class plus noise, and the classes (count,)."""
    g = torch.Generator().manual_seed(2000 + seed)
    coarse = torch.randn(classes, 1, 4, 4, generator=g)
    prototypes = F.interpolate(coarse, size=(size, size), mode="bilinear", align_corners=True)
    labels = torch.randint(classes, (count,), generator=g)
    return prototypes[labels] + noise * torch.randn(count, 1, size, size, generator=g), labels


@cache
def characters() -> tuple[Tensor, int]:
    """Python's help topics as ids of characters, and the number of different characters."""
    from pydoc_data.topics import topics

    text = "".join(topics[name] for name in sorted(topics))
    ids = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([ids[character] for character in text]), len(ids)


def text_windows(count: int, length: int, seed: int) -> Tensor:
    """Ids (count, length) of consecutive characters of the text, each row from a random position."""
    ids, _ = characters()
    starts = torch.randint(len(ids) - length, (count,), generator=torch.Generator().manual_seed(3000 + seed))
    return ids[starts[:, None] + torch.arange(length)]
