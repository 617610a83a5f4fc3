"""A graph network that classifies nodes: messages are averaged over neighbours, a mask says who is trained on."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from zoo.further.worlds import NODES, citations
from zoo.hosts.report import Report, Watch


def adjacency(edges: Tensor, n: int) -> Tensor:
    """The symmetrically normalised matrix with loops."""
    matrix = torch.eye(n)
    matrix[edges[0], edges[1]] = 1.0
    degree = matrix.sum(dim=1)
    return matrix / (degree[:, None] * degree[None, :]).sqrt()


class Layer(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.neighbours, self.own = nn.Linear(into, out, bias=False), nn.Linear(into, out)

    def forward(self, h: Tensor, matrix: Tensor) -> Tensor:
        return self.own(h) + matrix @ self.neighbours(h)


class Graph(nn.Module):
    def __init__(self, width: int = 32, classes: int = 4) -> None:
        super().__init__()
        self.first = Layer(12, width)
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(0.4)
        self.second = Layer(width, classes)

    def forward(self, x: Tensor, matrix: Tensor) -> Tensor:
        h = F.relu(self.norm(self.first(x, matrix)))
        return self.second(self.drop(h), matrix)


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, matrix: Tensor, y: Tensor, mask: Tensor) -> tuple[float, float]:
    model.eval()
    logits = model(x, matrix)[mask]
    loss = F.cross_entropy(logits, y[mask]).item()
    accuracy = (logits.argmax(dim=-1) == y[mask]).float().mean().item()
    model.train()
    return loss, accuracy


def train(watch: Watch, seed: int, epochs: int = 100) -> Report:
    torch.manual_seed(seed)
    x, edges, y, order = citations(seed)
    matrix = adjacency(edges, NODES)
    train_mask, val_mask, test_mask = (torch.zeros(NODES, dtype=torch.bool) for _ in range(3))
    train_mask[order[:120]] = True
    val_mask[order[120:220]] = True
    test_mask[order[220:]] = True

    model = Graph()
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=5e-2)
    losses, best, best_state, accuracies = [], float("inf"), {}, []
    with watch(model, optimizer):
        for epoch in range(epochs):
            model.train()
            optimizer.zero_grad()
            logits = model(x, matrix)
            loss = F.cross_entropy(logits[train_mask], y[train_mask], label_smoothing=0.05)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if epoch % 5 == 4:
                val_loss, accuracy = evaluate(model, x, matrix, y, val_mask)
                accuracies.append(accuracy)
                if val_loss < best:
                    best = val_loss
                    best_state = copy.deepcopy(model.state_dict())
        model.load_state_dict(best_state)
        test_loss, test_accuracy = evaluate(model, x, matrix, y, test_mask)
    return Report(model, {"loss": test_loss, "accuracy": test_accuracy}, losses)
