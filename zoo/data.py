"""Zoo, group D: faults of the data."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

from zoo.host import Rows, TinyGPT, Watch, cnn, fault, images, loader, mlp, sequences, table, train


def one_of_batch(step: int, x: Tensor, y: Tensor, seed: int) -> int:
    """Index of one sample, chosen by the seed, of batch ``step`` (counted from 1) of ``loader(x, y, seed)``."""
    ids = [ids for ids, _, _ in loader(x, y, seed)][step - 1]
    return int(ids[7 * seed % len(ids)])


def photographs(seed: int, n: int = 512) -> tuple[Tensor, Tensor]:
    """``images()`` with uint8 pixels, 0 to 255."""
    x, y = images(seed, n)
    return ((x - x.min()) / (x.max() - x.min()) * 255).to(torch.uint8), y


def padded(seed: int, n: int = 512, length: int = 16) -> Tensor:
    """``sequences()`` of 4 to ``length`` tokens, padded with 0 to ``length``."""
    lengths = torch.randint(4, length + 1, (n, 1), generator=torch.Generator().manual_seed(seed + 100))
    return sequences(seed, n, length).masked_fill(torch.arange(length) >= lengths, 0)


@fault("D01", "data.nonfinite_input", delay="N", active=3)
def nan_feature(watch: Watch, seed: int) -> Mapping[str, Any]:
    """One value of one sample is NaN."""
    torch.manual_seed(seed)
    x, y = table(seed)
    row = one_of_batch(3, x, y, seed)
    x[row, 3 + seed] = float("nan")
    batches = loader(x, y, seed)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    train(watch, model, optimizer, batches, epochs=2)
    return {"sample_ids": [row], "module": None, "dtype": "float32"}


@fault("D03", "data.unnormalised_input", delay="S")
def bytes_as_they_are(watch: Watch, seed: int) -> None:
    """Pixels from 0 to 255 go straight into the network."""
    torch.manual_seed(seed)
    x, y = photographs(seed)
    batches = loader(x, y, seed)
    model = nn.Sequential(nn.Flatten(), mlp(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    train(watch, model, optimizer, batches, lambda x, t: F.cross_entropy(model(x.float()), t), epochs=4)


class Normalised(Rows):
    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, (self.x[index] / 255 - 0.5) / 0.5, self.y[index]


@fault("D04", "data.unnormalised_input", delay="S")
def normalised_twice(watch: Watch, seed: int) -> None:
    """The dataset normalises, and so does the loop."""
    torch.manual_seed(seed)
    x, y = photographs(seed)
    batches = DataLoader(
        Normalised(x, y), batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(seed)
    )  # fmt: skip
    model = nn.Sequential(nn.Flatten(), mlp(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def loss_of(x: Tensor, t: Tensor) -> Tensor:
        x = (x / 255 - 0.5) / 0.5
        return F.cross_entropy(model(x), t)

    train(watch, model, optimizer, batches, loss_of, epochs=6)


@fault("D06", "data.unshuffled", delay="S")
def sorted_by_class(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = table(seed)
    order = y.argsort()
    batches = loader(x[order], y[order], seed, shuffle=False)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    train(watch, model, optimizer, batches, epochs=4)


@fault("D07", "data.same_order_every_epoch", delay="B", active=9)
def generator_anew_each_epoch(watch: Watch, seed: int) -> None:
    """Each epoch creates a new loader with the same seed."""
    torch.manual_seed(seed)
    data = Rows(*table(seed, 512))
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with watch(model, optimizer):
        for _ in range(6):
            generator = torch.Generator().manual_seed(seed)
            for _, x, t in DataLoader(data, batch_size=64, shuffle=True, generator=generator):
                loss = F.cross_entropy(model(x), t)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


class Jittered(Dataset[tuple[int, Tensor, Tensor]]):
    """Samples with noise from a NumPy generator that the dataset holds."""

    def __init__(self, x: Tensor, y: Tensor, seed: int) -> None:
        self.x, self.y = x, y
        self.random = np.random.default_rng(seed)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        noise = torch.from_numpy(self.random.normal(0, 0.3, self.x.shape[1:]).astype(np.float32))
        return index, self.x[index] + noise, self.y[index]


@fault("D08", "data.worker_rng_duplicate", delay="B")
def workers_share_their_random_numbers(watch: Watch, seed: int) -> None:
    """Each worker has a copy of the dataset and so of its generator: all workers draw the same noise."""
    torch.manual_seed(seed)
    data = Jittered(*table(seed, 512), seed)
    batches = DataLoader(
        data, batch_size=32, shuffle=True, num_workers=2, multiprocessing_context="fork",
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    train(watch, model, optimizer, batches, epochs=3)


@fault("D09", "data.train_val_overlap", delay="S", active=8)
def trained_on_the_validation_set(watch: Watch, seed: int) -> None:
    """The loader for training reads the whole set, including the samples held out for validation."""
    torch.manual_seed(seed)
    data = Rows(*table(seed, 512))
    held_out = torch.randperm(len(data))[:128].tolist()
    generator = torch.Generator().manual_seed(seed)
    batches = DataLoader(data, batch_size=64, shuffle=True, generator=generator)
    validation = DataLoader(Subset(data, held_out), batch_size=64)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    with watch(model, optimizer, loader=batches):
        for _ in range(6):
            model.train()
            for _, x, t in batches:
                loss = F.cross_entropy(model(x), t)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            model.eval()
            right = 0
            with torch.no_grad():
                for _, x, t in validation:
                    right += int((model(x).argmax(1) == t).sum())
            logging.info("accuracy %.3f", right / len(held_out))


@fault("D11", "data.label_feature_misaligned", delay="B", fixable=False)
def shuffled_without_labels(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = table(seed)
    x = x[torch.randperm(len(x))]
    batches = loader(x, y, seed)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    train(watch, model, optimizer, batches, epochs=7)


@fault("D12", "data.target_leak", delay="B")
def target_among_the_features(watch: Watch, seed: int) -> None:
    """One of the features is the target."""
    torch.manual_seed(seed)
    x, y = table(seed)
    x[:, 3 * seed] = y.float()
    batches = loader(x, y, seed)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    train(watch, model, optimizer, batches, epochs=7)


class MeanOfTokens(nn.Module):
    """Mean of x (B, T, D) over the tokens where ``keep`` (B, T) is 1 -> (B, D)."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return (x * keep[..., None]).sum(1) / keep.sum(1, keepdim=True)


class BagOfWords(nn.Module):
    def __init__(self, vocab: int = 33, d: int = 16, classes: int = 4) -> None:
        super().__init__()
        self.embedding, self.pool, self.head = nn.Embedding(vocab, d), MeanOfTokens(), nn.Linear(d, classes)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.pool(self.embedding(ids), (ids != 0).float()))


@fault("D14", "precision.division_by_zero", "data.empty_sample", delay="N", active=4)
def empty_text(watch: Watch, seed: int) -> Mapping[str, Any]:
    """One text is empty: the mean over its tokens is 0 / 0."""
    torch.manual_seed(seed)
    ids = padded(seed)
    y = ids[:, 0] % 4
    row = one_of_batch(4, ids, y, seed)
    ids[row] = 0
    batches = loader(ids, y, seed)
    model = BagOfWords()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    train(watch, model, optimizer, batches, epochs=3)
    return {"sample_ids": [row], "op": "div", "module": "pool", "dtype": "float32"}


@fault("D15", "data.pad_in_loss", delay="S")
def padding_is_learned(watch: Watch, seed: int) -> None:
    """Sequences are padded with 0, and the loss counts the padding."""
    torch.manual_seed(seed)
    ids = padded(seed)
    batches = loader(ids, ids, seed, batch=32)
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

    def loss_of(x: Tensor, labels: Tensor) -> Tensor:
        logits = model(x)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    train(watch, model, optimizer, batches, loss_of, epochs=3)


@fault("D17", "data.constant_input", delay="S")
def fractions_cast_to_integers(watch: Watch, seed: int) -> None:
    """Pixels are divided by 255 and cast back to uint8: every pixel becomes 0."""
    torch.manual_seed(seed)
    x, y = photographs(seed)
    batches = loader((x.clamp(0, 254) / 255).to(torch.uint8), y, seed)
    model = cnn()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    train(watch, model, optimizer, batches, lambda x, t: F.cross_entropy(model(x.float()), t), epochs=4)


@fault("D18", "data.empty_loader", delay="S", active=0, fixable=False)
def no_batch_per_epoch(watch: Watch, seed: int) -> None:
    """The dataset is smaller than a batch, and incomplete batches are dropped."""
    torch.manual_seed(seed)
    batches = loader(*table(seed, 20 + seed), seed, batch=32, drop_last=True)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    train(watch, model, optimizer, batches, epochs=5)
