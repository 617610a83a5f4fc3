"""Datasets, models and losses to name in recipes: healthy ones, and some with one fault each."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

DIM, CLASSES = 16, 4
TRAIN, VAL = 256, 128
"""Numbers of samples, enough for a significant test whether neighbours have equal labels."""


def size(split: str) -> int:
    return TRAIN if split == "train" else VAL


def _drawn(count: int, seed: int, classes: int = CLASSES, share: float | None = None) -> tuple[Tensor, Tensor]:
    """Returns points (count, DIM) around one centre for each class, and their classes."""
    centres = 1.5 * torch.randn(classes, DIM, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (count,), generator=generator)
    if share is not None:
        y = (torch.rand(count, generator=generator) > share).long()
    return centres[y] + torch.randn(count, DIM, generator=generator), y


def blobs(split: str = "train", fault: str = "", count: int = TRAIN) -> Dataset[Any]:
    """A TensorDataset of blobs, with a fault."""
    x, y = _drawn(count if split == "train" else VAL, 1 if split == "train" or fault == "val is train" else 2)
    if fault == "val is train":
        x, y = x[:VAL], y[:VAL]
    if fault == "shifted":
        y = y.roll(1)
    elif fault == "shuffled":
        y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(3))]
    elif fault == "from one":
        y = y + 1
    elif fault == "one wild label":
        y[len(y) - 3] = 17
    elif fault == "constant":
        x = torch.zeros_like(x)
    elif fault == "bytes":
        x = ((x - x.min()) / (x.max() - x.min()) * 255).round()
    elif fault == "nan":
        x[5, 3] = float("nan")
    elif fault == "integers":
        x = (10 * x).long()
    elif fault == "duplicates":
        x, y = x[: len(x) // 4].repeat(4, 1), y[: len(y) // 4].repeat(4)
    elif fault == "one class":
        y = torch.zeros_like(y)
    elif fault == "uneven columns":
        x[:, 0] *= 1e5
    elif fault == "double normalised":
        x = 0.5 + x / 1000
    elif fault == "two labels":
        x, y = x.repeat(2, 1), torch.cat([y, (y + 1) % CLASSES])
    return TensorDataset(x, y)


def imbalanced(split: str = "train") -> Dataset[Any]:
    """95 % of one class."""
    return TensorDataset(*_drawn(size(split), 1 if split == "train" else 2, 2, 0.95))


def numbers(split: str = "train", scale: float = 1.0) -> Dataset[Any]:
    """Regression: a number for each point."""
    x, _ = _drawn(size(split), 1 if split == "train" else 2)
    weights = torch.randn(DIM, 1, generator=torch.Generator().manual_seed(5))
    return TensorDataset(x, scale * (x @ weights / 4 + torch.sin(x[:, :1])))


class Augmented(Dataset[Any]):
    """Blobs with noise that is drawn at each read. ``destroy``: noise replaces the sample."""

    def __init__(self, split: str = "train", destroy: bool = False) -> None:
        self.x, self.y = _drawn(size(split), 1 if split == "train" else 2)
        self.split, self.destroy = split, destroy

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index]
        if self.split == "train":
            x = torch.randn(DIM) if self.destroy else x + 0.1 * torch.randn(DIM)
        return x, self.y[index]


class Slow(Augmented):
    """Takes 2 ms to read a sample."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.002)
        return super().__getitem__(index)


class Torn(Augmented):
    """One sample cannot be read."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 40 and self.split == "train":
            raise OSError("image file is truncated")
        return super().__getitem__(index)


class Fatal(Augmented):
    """One sample ends the process that reads it."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 40 and self.split == "train":
            os._exit(3)
        return super().__getitem__(index)


class Named(Augmented):
    """Samples as dicts of bytes, which the model normalizes. A fifth of the labels is -1, which the loss ignores."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:  # type: ignore[override]
        x = (32 * self.x[index] + 128).clamp(0, 255).to(torch.uint8)
        return {"pixels": x, "label": self.y[index] if index % 5 else torch.tensor(-1)}


class Normed(nn.Module):
    """Converts bytes to floats and normalizes them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body = nn.BatchNorm1d(DIM), net()

    def forward(self, pixels: Tensor) -> Tensor:
        return self.body(self.norm(pixels.float()))


def named_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["pixels"]), batch["label"], ignore_index=-1)


class Stream(IterableDataset[Any]):
    """The blobs one after the other, without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = _drawn(4096, 1)
        yield from zip(x, y, strict=True)


def images(split: str = "train") -> Dataset[Any]:
    """Images of 8 x 8 pixels with a bright row whose position is the class."""
    count = size(split)
    y = _drawn(count, 1 if split == "train" else 2)[1]
    generator = torch.Generator().manual_seed(11 if split == "train" else 12)
    x = 0.5 * torch.randn(count, 1, 8, 8, generator=generator)
    x[torch.arange(count), 0, 2 * y] += 2
    return TensorDataset(x, y)


def tokens(split: str = "train", offset: int = 1, wild: bool = False) -> Dataset[Any]:
    """Rows of 16 ids that rise by 1 to 3 modulo 23. The targets are ``offset`` ids later. ``wild``: one id is 99."""
    generator = torch.Generator().manual_seed(1 if split == "train" else 2)
    start = torch.randint(23, (size(split), 1), generator=generator)
    ids = (start + torch.randint(1, 4, (size(split), 20), generator=generator).cumsum(1)) % 23
    if wild:
        ids[200, 7] = 99
    return TensorDataset(ids[:, 2:18], ids[:, 2 + offset : 18 + offset])


def net(
    width: int = 32, outputs: int = CLASSES, depth: int = 1, norm: bool = False, inputs: int = DIM, dropout: float = 0.0
) -> nn.Module:
    """A plain network."""
    layers: list[nn.Module] = []
    for n in range(depth):
        layers += [nn.Linear(inputs if n == 0 else width, width), *([nn.BatchNorm1d(width)] if norm else []), nn.ReLU()]
        layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def frozen() -> nn.Module:
    return net().requires_grad_(False)


def dead() -> nn.Module:
    """Biases so low that no unit of the hidden layer is ever active."""
    model = net()
    nn.init.constant_(model[0].bias, -100.0)  # type: ignore[index]
    return model


def zeros() -> nn.Module:
    """Every weight is 0."""
    model = net(depth=2)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def large() -> nn.Module:
    """All parameters are 20 times their usual size."""
    model = net(depth=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20)
    return model


def convolutions() -> nn.Module:
    """Return a model of images with BatchNorm."""
    first = [nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(16 * 4 * 4, CLASSES))


class Deep(nn.Module):
    """Twelve sigmoid layers without skip connections, so that the gradient vanishes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(12)])
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sigmoid(layer(x))
        return self.head(x)


class Detached(nn.Module):
    """Two branches, one of them without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = net(8), net(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.two(x).detach()


class Blind(nn.Module):
    """Ignores its input: replaces it with ones."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(torch.ones_like(x))


class Transformer(nn.Module):
    """A language model whose mask may be missing."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(23, 32), nn.Parameter(0.02 * torch.randn(16, 32))
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head, self.causal = nn.Linear(32, 23), causal

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1]) if self.causal else None
        return self.head(self.layer(self.embed(ids) + self.place, src_mask=mask))


class Huge(nn.Module):
    """Weights of 256 GiB."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(DIM, CLASSES)
        self.rest = nn.ModuleList([nn.Linear(65536, 65536) for _ in range(16)])

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def softmax_first(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.softmax(1), target)


def probabilities(output: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(output.softmax(1), target)


def upwards(output: Tensor, target: Tensor) -> Tensor:
    return -F.cross_entropy(output, target)


def broadcast(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target.squeeze(-1))


def as_numbers(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.squeeze(-1), target.float())


def cut(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.detach(), target)


def logarithm(output: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(output.relu().log(), target)


def sixteen_fail(output: Tensor, target: Tensor) -> Tensor:
    """Fails for a batch of 16 samples. Only the training on one batch has this size."""
    if len(output) == 16:
        raise RuntimeError("16 samples failed")
    return F.cross_entropy(output, target)


def eight_fail(output: Tensor, target: Tensor) -> Tensor:
    """Fails for a batch of 8 samples. The trace with 2 and 4 samples does not have this size."""
    if len(output) == 8:
        raise RuntimeError("8 samples failed")
    return F.cross_entropy(output, target)
