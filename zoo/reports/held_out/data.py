"""Faults of the data."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

from zoo.reports.case import Outcome, Place, Watch, fault, fell, mean


class UNet(nn.Module):
    def __init__(self, classes: int):
        super().__init__()
        self.inc = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        self.up = nn.Upsample(scale_factor=2)
        self.outc = nn.Conv2d(48, classes, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        return self.outc(torch.cat([x1, self.up(self.down(x1))], 1))


def scenes(count: int, seed: int, *, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Gray pictures (count, 16, 16) with a square of each class that is not background, and their masks."""
    g = np.random.RandomState(seed)
    images, masks = np.zeros((count, 16, 16), np.float32), np.zeros((count, 16, 16), np.uint8)
    for image, mask in zip(images, masks):
        for label in range(1, classes):
            row, column = g.randint(0, 11, 2)
            mask[row : row + 5, column : column + 5] = label
        image += mask / classes + 0.1 * g.randn(16, 16)
    return images, masks


class Compose:
    def __init__(self, *transforms: Callable[[np.ndarray], np.ndarray]):
        self.transforms = transforms

    def __call__(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """Apply the same random transforms to all arrays."""
        for transform in self.transforms:
            if random.random() < 0.5:
                arrays = tuple(transform(array) for array in arrays)
        return [array.copy() for array in arrays]


class SegmentationDataset(Dataset[Any]):
    def __init__(self, images: np.ndarray, masks: np.ndarray, transform: Compose | None, *, apart: bool = False):
        self.images, self.masks, self.transform, self.apart = images, masks, transform, apart

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        img, seg = self.images[index], self.masks[index]
        if self.transform is not None:
            if self.apart:
                (img,), (seg,) = self.transform(img), self.transform(seg)
            else:
                img, seg = self.transform(img, seg)
        return torch.from_numpy(img)[None], torch.from_numpy(seg).float()[None]


@fault(
    "mask_transformed_apart",
    "the random flips of the image and of its mask are drawn separately",
    sources=["albumentations-team/albumentations#1056", "albumentations-team/albumentations#397"],
    stage="data",
    diagnosis=[
        r"(mask|target|label|segmentation)\w* & (transform|augment|flip|align|register|spatial|match)\w* & !shift",
        r"(transform|augment|flip)\w* & (separate|independent|apart|not the same|differently)",
    ],
    where=[Place(line=r"self\.transform\(|in train_loader")],
)
def mask_transformed_apart(watch: Watch, seed: int, faulty: bool) -> Outcome:
    random.seed(seed)
    images, masks = scenes(1024, seed, classes=2)
    flips = Compose(np.fliplr, np.flipud)
    train_loader = DataLoader(
        SegmentationDataset(images[:896], masks[:896], flips, apart=faulty), batch_size=16, shuffle=True
    )
    val_loader = DataLoader(SegmentationDataset(images[896:], masks[896:], None), batch_size=64)
    model = UNet(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses, dice = [], []
    with watch(model, optimizer, loader=train_loader):
        for _epoch in range(4):
            model.train()
            for img, seg in train_loader:
                loss = F.binary_cross_entropy_with_logits(model(img), seg)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            model.eval()
            with torch.no_grad():
                for img, seg in val_loader:
                    said = (model(img) > 0).float()
                    dice.append((2 * (said * seg).sum() / (said.sum() + seg.sum())).item())
    return Outcome(losses, dice[-1] < 0.6, {"dice": dice[-1], "last_loss": mean(losses[-20:])})


def to_tensor(picture: np.ndarray) -> Tensor:
    """As `torchvision.transforms.ToTensor`: bytes are scaled to 0..1."""
    tensor = torch.from_numpy(picture)[None]
    return tensor.float().div(255) if tensor.dtype == torch.uint8 else tensor


class TwoPictures(Dataset[Any]):
    """A picture and its mask, both made tensors by the same transform or the mask by another."""

    def __init__(self, images: np.ndarray, masks: np.ndarray, target_transform: Callable[[np.ndarray], Tensor]):
        self.images, self.masks, self.target_transform = images, masks, target_transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return to_tensor(self.images[index]), self.target_transform(self.masks[index])


@fault(
    "mask_to_tensor",
    "ToTensor scales the class mask by 1/255, and as integers all labels are 0",
    sources=["pytorch/vision#2497", "albumentations-team/albumentations#148"],
    stage="data",
    diagnosis=[
        r"(label|target|class|mask)\w* & (all|only|one|single|constant|never|same|zero|\b0\b) & !ignore & !gradient",
        r"\b255\b|to ?tensor",
    ],
    where=[Place(line=r"to_tensor|\.long\(\)|div\(255\)|cross_entropy"), Place(op="cross_entropy")],
)
def mask_to_tensor(watch: Watch, seed: int, faulty: bool) -> Outcome:
    images, masks = scenes(1024, seed, classes=4)
    dataset = TwoPictures(images, masks, to_tensor if faulty else lambda mask: torch.from_numpy(mask)[None])
    train_loader = DataLoader(dataset, batch_size=16, shuffle=True)
    model = UNet(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    losses, labels = [], set()
    with watch(model, optimizer, loader=train_loader):
        for _epoch in range(4):
            for image, target in train_loader:
                target = target.squeeze(1).long()
                loss = F.cross_entropy(model(image), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                labels |= set(target.unique().tolist())
    return Outcome(losses, labels == {0}, {"labels": sorted(labels), "last_loss": mean(losses[-20:])})


class VolumeDataset(Dataset[Any]):
    """Volumes with a ball, with a random contrast from a generator that the data set holds."""

    def __init__(self, count: int, seed: int):
        g = np.random.RandomState(seed)
        center, self.radius = g.uniform(3, 6, (count, 3, 1, 1, 1)), g.uniform(1, 3, (count, 1, 1, 1))
        grid = np.stack(np.meshgrid(*[np.arange(10)] * 3, indexing="ij"))
        self.labels = (((grid - center) ** 2).sum(1) < self.radius**2).astype(np.float32)
        self.raw = (self.labels + 0.3 * g.randn(*self.labels.shape)).astype(np.float32)
        self.random_state = np.random.RandomState(47)

    def __len__(self) -> int:
        return len(self.raw)

    def __getitem__(self, index: int) -> Any:
        alpha = np.float32(self.random_state.uniform(0.5, 1.5))
        m = self.random_state.permutation(3)
        raw, label = (np.transpose(volume, m).copy() for volume in (self.raw[index], self.labels[index]))
        return torch.from_numpy(alpha * raw)[None], torch.from_numpy(label)[None], alpha


def reseed(worker_id: int) -> None:
    info = get_worker_info()
    info.dataset.random_state.seed(info.seed % 2**32)


@fault(
    "worker_numpy_seed",
    "the workers have copies of one NumPy generator, and so augment alike, in every epoch again",
    sources=["wolny/pytorch-3dunet#32", "Project-MONAI/MONAI#1068", "xingyizhou/CenterNet#233"],
    stage="data",
    diagnosis=[
        r"worker & (rng|random|seed|generator|augment|numpy)",
        r"(augment|random)\w* & (repeat|same|identical|duplicat)",
    ],
    where=[Place(line=r"RandomState\(|random_state\.|num_workers|in train_loader")],
)
def worker_numpy_seed(watch: Watch, seed: int, faulty: bool) -> Outcome:
    train_loader = DataLoader(
        VolumeDataset(384, seed), batch_size=8, shuffle=True, num_workers=2, worker_init_fn=None if faulty else reseed
    )
    model = nn.Sequential(
        *(nn.Conv3d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU()),
        *(nn.Conv3d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv3d(8, 1, 1)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses, contrasts = [], []
    with watch(model, optimizer, loader=train_loader):
        for _epoch in range(4):
            for raw, label, alpha in train_loader:
                loss = F.binary_cross_entropy_with_logits(model(raw), label)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                contrasts += alpha.tolist()
    different = len(set(contrasts)) / len(contrasts)
    return Outcome(losses, different < 0.2 and fell(losses), {"different_contrasts": different})
