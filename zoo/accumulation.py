"""Zoo, group A: faults of gradient accumulation, in plain PyTorch loops."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from zoo.host import TinyGPT, Watch, fault, host, loader, next_token_loss, sequences

WINDOW = 4


@fault("A01", "gradient.accumulation_not_normalised", delay="S", fixable=False)
def sum_of_micro_batches(watch: Watch, seed: int) -> None:
    model, optimizer, data = host(seed, torch.optim.SGD, lr=0.1, batch=16)
    with watch(model, optimizer, loader=data):
        for _ in range(2):
            for i, (_, x, y) in enumerate(data):
                F.cross_entropy(model(x), y).backward()
                if (i + 1) % WINDOW == 0:
                    optimizer.step()
                    optimizer.zero_grad()


@fault("A02", "gradient.accumulation_token_weighting", delay="S", fixable=False)
def mean_of_token_means(watch: Watch, seed: int) -> None:
    """The loss is the mean over each micro-batch: one with 4 target tokens weighs as much as one with 30."""
    torch.manual_seed(seed)
    model = TinyGPT()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    ids = sequences(seed, n=320)
    length = torch.where(torch.rand(320, 1) < 0.5, torch.randint(3, 6, (320, 1)), torch.randint(12, 17, (320, 1)))
    ids[torch.arange(16) >= length] = 0
    data = loader(ids, ids, seed, batch=2)
    with watch(model, optimizer, loader=data):
        for i, (_, batch, _) in enumerate(data):
            loss = next_token_loss(model(batch), batch, ignore_index=0)
            (loss / WINDOW).backward()
            if (i + 1) % WINDOW == 0:
                optimizer.step()
                optimizer.zero_grad()


@fault("A03", "gradient.accumulation_discarded", delay="S", fixable=False)
def zero_grad_in_every_micro_batch(watch: Watch, seed: int) -> None:
    model, optimizer, data = host(seed, torch.optim.SGD, lr=0.1, batch=16)
    with watch(model, optimizer, loader=data):
        for _ in range(2):
            for i, (_, x, y) in enumerate(data):
                optimizer.zero_grad()
                (F.cross_entropy(model(x), y) / WINDOW).backward()
                if (i + 1) % WINDOW == 0:
                    optimizer.step()


@fault("A05", "gradient.accumulation_window_wrong", delay="S", active=16, fixable=False)
def window_across_epochs(watch: Watch, seed: int) -> None:
    """An epoch has 62 micro-batches, a window 4: gradients of the last 2 stay in ``.grad`` until the next epoch."""
    model, optimizer, data = host(seed, torch.optim.SGD, lr=0.1, n=992, batch=16)
    with watch(model, optimizer, loader=data):
        for _ in range(3):
            for i, (_, x, y) in enumerate(data):
                (F.cross_entropy(model(x), y) / WINDOW).backward()
                if (i + 1) % WINDOW == 0:
                    optimizer.step()
                    optimizer.zero_grad()
