"""Recommendation: factors and biases of users and items, sampled negatives, the last item of each user is held out."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from zoo.further.worlds import ITEMS, USERS, tastes
from zoo.hosts.report import Report, Watch


class Factors(nn.Module):
    def __init__(self, size: int = 12) -> None:
        super().__init__()
        self.user = nn.Embedding(USERS, size)
        self.item = nn.Embedding(ITEMS, size)
        self.bias = nn.Embedding(ITEMS, 1)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.item.weight, std=0.1)
        nn.init.zeros_(self.bias.weight)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Scores (n, k) of items (n, k) for users (n,)."""
        products = self.user(users).unsqueeze(1) * self.item(items)
        return products.sum(dim=-1) + self.bias(items).squeeze(-1)


def split(liked: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs (n, 2) to train on, the item of each user that is held out, and what each has seen (USERS, ITEMS)."""
    seen = torch.zeros(USERS, ITEMS, dtype=torch.bool)
    pairs, last = [], []
    for user, items in enumerate(liked):
        for item in items[:-1]:
            pairs.append((user, item))
            seen[user, item] = True
        last.append(items[-1])
    return torch.tensor(pairs), torch.tensor(last), seen


def sample_negatives(users: Tensor, seen: Tensor, k: int) -> Tensor:
    """Items (n, k) that these users have not seen."""
    weights = (~seen[users]).float()
    return torch.multinomial(weights, k, replacement=True)


def loss_of(model: nn.Module, users: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    right = model(users, positive.unsqueeze(1))
    wrong = model(users, negative)
    fit = -F.logsigmoid(right).mean() - F.logsigmoid(-wrong).mean()
    size = model.user(users).square().sum(dim=1).mean() + model.item(positive).square().sum(dim=1).mean()
    return fit + 5e-3 * size


@torch.no_grad()
def evaluate(model: nn.Module, last: Tensor, seen: Tensor, top: int = 10) -> tuple[float, float]:
    """Hit rate and NDCG of the item that is held out among all that the user has not seen."""
    model.eval()
    hits, gain = 0.0, 0.0
    for users in torch.arange(USERS).split(40):
        scores = model(users, torch.arange(ITEMS).expand(len(users), -1))
        scores = scores.masked_fill(seen[users], -torch.inf)
        wanted = scores.gather(1, last[users].unsqueeze(1))
        rank = (scores > wanted).sum(dim=1)
        hits += (rank < top).sum().item()
        gain += (torch.where(rank < top, 1 / torch.log2(rank + 2.0), 0.0)).sum().item()
    model.train()
    return hits / USERS, gain / USERS


def train(watch: Watch, seed: int, epochs: int = 12) -> Report:
    torch.manual_seed(seed)
    pairs, last, seen = split(tastes(seed))
    batches = DataLoader(TensorDataset(pairs), batch_size=128, shuffle=True)

    model = Factors()
    optimizer = Adam(model.parameters(), lr=2e-2)
    losses, shown = [], (0.0, 0.0)
    with watch(model, optimizer, loader=batches):
        for epoch in range(epochs):
            model.train()
            total = 0.0
            for (batch,) in batches:
                users, positive = batch[:, 0], batch[:, 1]
                negative = sample_negatives(users, seen, 4)
                loss = loss_of(model, users, positive, negative)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item()
            losses.append(total / len(batches))
            if epoch % 3 == 2:
                shown = evaluate(model, last, seen)
    return Report(model, {"hit_rate": shown[0], "ndcg": shown[1]}, losses, {"seen": seen})
