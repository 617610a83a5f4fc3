"""Images in folders that are named for their classes, and scikit-learn's 1,797 handwritten digits (no download).

Shapes: an image is (3, H, W), or (1, H, W) in grey; a digit is (1, 8, 8).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from trainwright.errors import UsageError, import_optional, require_choice, suggest_file

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


Split: TypeAlias = Literal["train", "val"]
NOISE_STD = 0.1


class Digits(Dataset[tuple[Tensor, int]]):
    """(image, label) pairs; the images have mean 0 and standard deviation 1 over the training split.

    ``augment`` shifts each image by up to one pixel in both directions and adds noise, drawn from torch's global CPU
    generator when the items are read. ``data.fetch.Fetch`` seeds that generator for each sample.
    """

    classes = 10

    def __init__(self, images: Tensor, labels: Tensor, *, augment: bool = False) -> None:
        self.images = images
        self.labels = labels
        self.augment = augment
        self.deterministic = not augment
        self._padded = torch.nn.functional.pad(images, (1, 1, 1, 1), mode="replicate") if augment else images

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self._augmented(index) if self.augment else self.images[index]
        return image, int(self.labels[index])

    def fetch_batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return the collated batch of these samples: images (B, 1, 8, 8) float32 and labels (B,) int64."""
        assert self.deterministic, "augmented samples must be read one at a time"
        positions = torch.from_numpy(np.asarray(indices, dtype=np.int64))
        return self.images[positions], self.labels[positions]

    def _augmented(self, index: int) -> Tensor:
        """Shift an image by -1, 0 or 1 pixels down and right, with a replicated border, and add noise."""
        image_1HW = self.images[index]
        _, height, width = image_1HW.shape
        top, left = torch.randint(0, 3, (2,), device="cpu").tolist()
        moved = self._padded[index, :, top : top + height, left : left + width]
        return moved + NOISE_STD * torch.randn(image_1HW.shape, device="cpu")

    def content_sha256(self) -> str:
        """Return a hash of the images, the labels and ``augment``."""
        digest = hashlib.sha256(f"augment={self.augment}".encode())
        digest.update(self.images.numpy().tobytes())
        digest.update(self.labels.numpy().tobytes())
        return digest.hexdigest()


def digits(split: Split = "train", *, val_share: float = 0.2, augment: bool = False) -> Digits:
    """1,797 images of handwritten digits, 8 x 8 pixels, from scikit-learn.

    The split is fixed, and takes the same fraction of each digit.

    Args:
        split: ``train`` or ``val``.
        val_share: Fraction of the images that is held out for ``val``.
        augment: Shift each training image by up to one pixel and add noise. Both change on every access.

    Raises MissingExtra without scikit-learn.
    """
    require_choice("split", split, get_args(Split))
    if not 0 < val_share < 1:
        raise UsageError(f"val_share must be in (0, 1); got {val_share}", remedy="try val_share=0.2")
    datasets = import_optional("sklearn.datasets", needed_for="digits", package="scikit-learn")
    pixels, labels = datasets.load_digits(return_X_y=True)
    is_val = _validation_part(labels, val_share)
    train = pixels[~is_val]
    images = ((pixels - train.mean()) / train.std()).astype(np.float32).reshape(-1, 1, 8, 8)
    chosen = is_val if split == "val" else ~is_val
    return Digits(torch.from_numpy(images[chosen]), torch.from_numpy(labels[chosen]).long(), augment=augment)


def _validation_part(labels: NDArray[np.int64], val_share: float) -> NDArray[np.bool_]:
    """Return a mask of a fixed random sample, the fraction ``val_share`` of each class (by raw Philox words)."""
    words = np.random.Philox(key=0).random_raw(len(labels))
    is_val = np.zeros(len(labels), dtype=np.bool_)
    for label in range(Digits.classes):
        members = np.flatnonzero(labels == label)
        count = round(val_share * len(members))
        is_val[members[np.argsort(words[members], kind="stable")[:count]]] = True
    return is_val
