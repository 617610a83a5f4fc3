"""Images in folders that are named for their classes. Shapes: an image is (3, H, W), or (1, H, W) in grey."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainwright.errors import UsageError, import_optional, suggest_file

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


class Images(Dataset[tuple[Tensor, int]]):
    """(image float32 from 0 to 1, class) for each file below ``folder/CLASS/``.

    ``labels`` are the names of the classes in order.

    Args:
        folder: The folder; a relative path starts at the current one.
        size: Height and width that all images are resized to, in pixels.
        grey: One channel instead of three.

    Raises UsageError without a class that has a file, MissingExtra without Pillow.
    """

    deterministic = True

    def __init__(self, folder: str | Path, *, size: int = 64, grey: bool = False) -> None:
        root = Path(folder).expanduser()
        import_optional("PIL.Image", needed_for="a folder of images", package="Pillow")
        if size < 1:
            raise UsageError(f"size={size} is no number of pixels", remedy="try size=64")
        if not root.is_dir():
            raise UsageError(f"{folder} is no folder", remedy=suggest_file(root, "a folder of images"))
        found = {
            each.name: sorted(file for file in each.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
            for each in sorted(root.iterdir())
            if each.is_dir()
        }
        self.labels = tuple(name for name, files in found.items() if files)
        if not self.labels:
            raise UsageError(f"{folder} has no folder with images", remedy="put them into folder/CLASS/image.png")
        self.classes = len(self.labels)
        self.files = [(file, code) for code, name in enumerate(self.labels) for file in found[name]]
        self.size, self.mode = size, "L" if grey else "RGB"

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        file, code = self.files[index]
        with Image.open(file) as image:
            pixels = np.asarray(image.convert(self.mode).resize((self.size, self.size)), dtype=np.float32) / 255
        whole = torch.from_numpy(pixels)
        return (whole[None] if whole.dim() == 2 else whole.permute(2, 0, 1).contiguous()), code
