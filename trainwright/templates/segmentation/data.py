"""Drawn images of a disc and a square in noise. Put your own images and masks here."""

import torch
from torch.utils.data import TensorDataset

SIZE = 32
"""Height and width of an image, in pixels."""


def shapes(split: str, count: int = 512) -> TensorDataset:
    """Return (image (1, H, W), mask (H, W)); 0 is background, 1 disc, 2 square."""
    generator = torch.Generator().manual_seed(1 if split == "val" else 0)
    centers = torch.randint(7, SIZE - 7, (count, 2, 2, 1, 1), generator=generator)
    radii = torch.randint(4, 8, (count, 2, 1, 1), generator=generator)
    rows, columns = torch.arange(SIZE)[:, None], torch.arange(SIZE)
    down, right = rows - centers[:, :, 0], columns - centers[:, :, 1]
    is_disc = (down.square() + right.square() <= radii.square())[:, 0]
    is_square = (torch.maximum(down.abs(), right.abs()) <= radii)[:, 1]
    masks = torch.where(is_square, 2, is_disc.long())
    noise = torch.randn(count, 1, SIZE, SIZE, generator=generator)
    return TensorDataset((masks > 0).float()[:, None] + 0.3 * noise, masks)
