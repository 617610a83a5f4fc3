"""Data sets and helpers of the public programs: handwritten digits and a text, the same in every run."""

from __future__ import annotations

import random
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor


def digits(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, 8, 8) float32 in [0, 1] and labels (n,) int64 of scikit-learn's digits, 1,437 train and 360 test."""
    bunch = load_digits()
    order = np.random.RandomState(0).permutation(len(bunch.target))
    rows = order[360:] if split == "train" else order[:360]
    return (bunch.images[rows] / 16).astype(np.float32), bunch.target[rows].astype(np.int64)


SUBJECTS = "the king|the queen|a soldier|my lord|the old man|her brother|the duke|a messenger|the child|his servant"
VERBS = "sees|loves|follows|fears|serves|hates|forgives|remembers|betrays|seeks"
OBJECTS = "the crown|a sword|the city|an answer|the enemy|the river|a letter|the night|no mercy|the truth"
ENDINGS = "in the morning|without a word|for many years|by the sea|at last|in vain|with all his heart|tonight"


def sentences(count: int) -> list[str]:
    """Random sentences of a small grammar, in lower case, without a full stop."""
    rng = random.Random(0)
    parts = [each.split("|") for each in (SUBJECTS, VERBS, OBJECTS, ENDINGS)]
    return [" ".join(rng.choice(part) for part in parts) for _ in range(count)]


def text(count: int = 1500) -> str:
    """The sentences as lines of one text, about 38 characters each."""
    return "".join(f"{each}.\n" for each in sentences(count))


def save_image(images: Tensor, path: str | Path, nrow: int = 8, normalize: bool = False) -> None:
    """Write images (n, 1, h, w) in [0, 1] as one PNG, ``nrow`` per row; a last row that is not full is left out."""
    images = images.detach().cpu().float()
    if normalize:
        images = (images - images.min()) / (images.max() - images.min()).clamp_min(1e-5)
    rows = [torch.cat(list(row[:, 0]), dim=1) for row in images.split(nrow) if len(row) == min(nrow, len(images))]
    grid = (torch.cat(rows).clamp(0, 1) * 255).round().to(torch.uint8)
    lines = b"".join(b"\0" + row.numpy().tobytes() for row in grid)
    header = struct.pack(">IIBBBBB", grid.shape[1], grid.shape[0], 8, 0, 0, 0, 0)
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")):
            file.write(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)))


def sliced_wasserstein(a: Tensor, b: Tensor) -> float:
    """Sliced Wasserstein distance of two samples of equal size, on 64 fixed directions."""
    a, b = a.detach().flatten(1).double(), b.detach().flatten(1).double()
    directions = torch.randn(a.shape[1], 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    directions = directions / directions.norm(dim=0)
    return ((a @ directions).sort(0).values - (b @ directions).sort(0).values).abs().mean().item()
