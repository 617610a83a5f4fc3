"""Generated images of geometric shapes, to classify or to segment; no download.

Shapes: N images, C channels (3), H and W image sides.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainwright.errors import UsageError, require_choice

Split: TypeAlias = Literal["train", "val"]
Task: TypeAlias = Literal["classify", "segment"]
NOISE_STD = 0.15


def _triangle(u: Tensor, v: Tensor) -> Tensor:
    return (v > -0.5) & (v < 1 - math.sqrt(3) * u.abs())


def _cross(u: Tensor, v: Tensor) -> Tensor:
    return (u.abs().minimum(v.abs()) < 0.3) & (u.abs().maximum(v.abs()) < 0.95)


FIGURES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "disc": lambda u, v: u.square() + v.square() < 0.7,
    "square": lambda u, v: u.abs().maximum(v.abs()) < 0.75,
    "triangle": _triangle,
    "cross": _cross,
    "ring": lambda u, v: (u.square() + v.square() < 1) & (u.square() + v.square() > 0.35),
}
"""Functions that test whether points belong to a figure with centre (0, 0) and a radius of about 1."""


class Shapes(Dataset[tuple[Tensor, Tensor]]):
    """(image_CHW, label) or (image_CHW, mask_HW); images have colours from about -1 to 1.

    ``labels`` are the names of the classes in order.
    """

    deterministic = True

    def __init__(self, images: Tensor, targets: Tensor, labels: tuple[str, ...]) -> None:
        self.images = images
        self.targets = targets
        self.labels = labels
        self.classes = len(labels)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.targets[index]

    def content_sha256(self) -> str:
        """Return a hash of images and targets."""
        digest = hashlib.sha256(self.images.numpy().tobytes())
        digest.update(self.targets.numpy().tobytes())
        return digest.hexdigest()


def shapes(
    split: Split = "train",
    *,
    task: Task = "classify",
    count: int = 4000,
    size: int = 32,
    figures: int = 1,
    seed: int = 0,
) -> Shapes:
    """Generated RGB images of bright discs, squares, triangles, crosses and rings before a dark background, with noise.

    Place, size, angle and colours are random. With 32 pixels the images have the shape of CIFAR's. The two splits have
    no image in common.

    Args:
        split: ``train`` or ``val``.
        task: ``classify``: the target is the kind of the figure. ``segment``: it is a mask of the size of the image, 0
            for background and 1 to 5 for the kinds.
        count: Number of images.
        size: Height and width, in pixels.
        figures: Figures in an image; later ones cover earlier ones. More than 1 only to ``segment``.
        seed: Another seed gives other images.

    Raises UsageError for a value that cannot be used.
    """
    require_choice("split", split, get_args(Split))
    require_choice("task", task, get_args(Task))
    if min(count, figures) < 1 or size < 8:
        raise UsageError(f"count={count}, size={size} and figures={figures} are too small", remedy="try size=32")
    if task == "classify" and figures > 1:
        raise UsageError(f"an image of {figures} figures has no single class", remedy="figures=1, or task=segment")
    draw = torch.Generator("cpu").manual_seed(2 * seed + (split == "val"))

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=draw, device="cpu")

    images_NCHW = uniform(-1, -0.2, 3, 1, 1).expand(count, 3, size, size)
    masks_NHW = torch.zeros(count, size, size, dtype=torch.int64)
    kinds_N = torch.zeros(count, dtype=torch.int64)
    at = torch.linspace(-1, 1, size, device="cpu")
    for _ in range(figures):
        kinds_N = torch.randint(len(FIGURES), (count,), generator=draw, device="cpu")
        x, y = at[None, None, :] - uniform(-0.5, 0.5, 1, 1), at[None, :, None] - uniform(-0.5, 0.5, 1, 1)
        angle, radius = uniform(0, 2 * math.pi, 1, 1), uniform(0.3, 0.6, 1, 1)
        u_NHW, v_NHW = (x * angle.cos() - y * angle.sin()) / radius, (x * angle.sin() + y * angle.cos()) / radius
        every_KNHW = torch.stack([inside(u_NHW, v_NHW) for inside in FIGURES.values()])
        inside_NHW = every_KNHW[kinds_N, torch.arange(count)]
        images_NCHW = torch.where(inside_NHW[:, None], uniform(0.2, 1, 3, 1, 1), images_NCHW)
        masks_NHW = torch.where(inside_NHW, kinds_N[:, None, None] + 1, masks_NHW)
    noise_NCHW = torch.randn(images_NCHW.shape, generator=draw, device="cpu")
    images_NCHW = images_NCHW + NOISE_STD * noise_NCHW
    if task == "segment":
        return Shapes(images_NCHW, masks_NHW, ("background", *FIGURES))
    return Shapes(images_NCHW, kinds_N, tuple(FIGURES))
