"""What a loop does beside the gradient: steps within backward, biases, states, multipliers and codes by hand."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import TensorDataset

from zoo.host import cnn
from zoo.programs.training import Batch, Training


def steps_within_backward(t: Training) -> None:
    """Steps within the backward pass (Lv et al., 2023): a hook steps as soon as the gradient of a weight is there."""
    t.epochs = 12

    def one_each(training: Training) -> list[Optimizer]:
        optimizers: dict[nn.Parameter, Optimizer] = {p: Adam([p], lr=t.lr) for p in training.parameters()}

        def step(p: Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in training.parameters():
            p.register_post_accumulate_grad_hook(step)
        return list(optimizers.values())

    def update(training: Training, batch: Batch) -> Tensor:
        loss = training.loss(training.model, batch)
        loss.backward()
        return loss.detach()

    t.optimizers_of, t.update = one_each, update


class BalancedExperts(nn.Module):
    """Two of eight experts for each row, beside one that all share. A bias without a gradient is for the choice."""

    def __init__(self, size: int, experts: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(size, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(size, 32), nn.SiLU(), nn.Linear(32, size)) for _ in range(experts + 1)
        )
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("rows", torch.zeros(experts))

    def forward(self, x: Tensor) -> Tensor:
        affinity = self.router(x).sigmoid()
        chosen = (affinity + self.bias).topk(2, dim=1).indices
        gates = affinity.gather(1, chosen)
        gates = gates / gates.sum(1, keepdim=True)
        self.rows = torch.bincount(chosen.flatten(), minlength=len(self.bias)).to(x.dtype)
        out = x + self.experts[-1](x)
        for number in range(len(self.bias)):
            row, place = (chosen == number).nonzero(as_tuple=True)
            if len(row):
                out = out.index_add(0, row, gates[row, place].unsqueeze(1) * self.experts[number](x[row]))
        return out


def balanced_without_loss(t: Training) -> None:
    """Loss-free balancing (Wang et al., 2024): a busy expert's bias sinks by a fixed step, an idle one's rises."""
    layer = BalancedExperts(48)
    t.model = nn.Sequential(nn.Linear(20, 48), layer, nn.LayerNorm(48), nn.Linear(48, 10))
    t.epochs = 6

    @torch.no_grad()
    def balance(training: Training) -> None:
        layer.bias.add_(0.01 * (layer.rows.mean() - layer.rows).sign())

    t.each_step.append(balance)


class WordModel(nn.Module):
    """An LSTM language model whose state goes on from one piece of a text to the next."""

    def __init__(self, words: int = 33, size: int = 48) -> None:
        super().__init__()
        self.words, self.drop = nn.Embedding(words, size), nn.Dropout(0.1)
        self.cell, self.out = nn.LSTM(size, size, 2, dropout=0.1), nn.Linear(size, words)
        self.out.weight = self.words.weight
        nn.init.uniform_(self.words.weight, -0.1, 0.1)
        nn.init.zeros_(self.out.bias)

    def forward(self, ids: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        found, state = self.cell(self.drop(self.words(ids)), state)
        return self.out(self.drop(found)), state


def carried_state(t: Training) -> None:
    """Everyday practice (Zaremba et al., 2014): a long text in columns; the state goes on, its gradient does not."""
    t.model, t.epochs, t.lr = WordModel(), 8, 5.0
    text = t.data.tensors[0].flatten()
    columns = text[: len(text) // 20 * 20].view(20, -1).T
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=t.lr)]

    def read(training: Training) -> Iterator[Tensor]:
        (optimizer,), model = training.optimizers, training.model
        for _ in range(training.epochs):
            state = (torch.zeros(2, 20, 48), torch.zeros(2, 20, 48))
            for begin in range(0, len(columns) - 1, 14):
                piece = columns[begin : begin + 15]
                logits, state = model(piece[:-1], (state[0].detach(), state[1].detach()))
                loss = F.cross_entropy(logits.flatten(0, 1), piece[1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.25)
                optimizer.step()
                yield loss.detach()

    t.loop, t.loaded = read, False


class Multipliers(nn.Module):
    """One for each constraint; they are kept at zero or above."""

    def __init__(self, constraints: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(constraints))

    def forward(self, amounts: Tensor) -> Tensor:
        return self.values @ amounts


def dual_ascent(t: Training) -> None:
    """Proxy Lagrangians (Cotter et al., 2019): weights descend on smooth constraints, multipliers ascend true ones."""
    multipliers, slack, (x, y) = Multipliers(2), 0.1, t.data.tensors
    group = torch.rand(len(y)) < torch.where(y > 4, 0.65, 0.35)  # one of the two has the class more often
    t.data = TensorDataset(torch.cat([x[:, :-1], 2.0 * group.unsqueeze(1) - 1], 1), (y > 4).float())
    t.model[-1] = nn.Linear(64, 1)
    t.extra.append(multipliers)
    t.batch_size, t.epochs = 128, 60
    t.optimizers_of = lambda training: [
        Adam(training.model.parameters(), lr=3e-3),
        SGD(multipliers.parameters(), lr=0.05, maximize=True),
    ]

    def excess(rates: Tensor, group: Tensor) -> Tensor:
        """By how much one group is chosen more often than the other, beyond the slack (2,)."""
        gap = rates[group].mean() - rates[~group].mean()
        return torch.stack([gap, -gap]) - slack

    def update(training: Training, batch: Batch) -> Tensor:
        x, y = batch
        z, group = training.model(x).squeeze(1), x[:, -1] > 0
        error = F.binary_cross_entropy_with_logits(z, y)
        for each in training.optimizers:
            each.zero_grad()
        (error + multipliers.values.detach() @ excess(z.sigmoid(), group)).backward()
        multipliers(excess((z > 0).float(), group)).backward()
        for each in training.optimizers:
            each.step()
        with torch.no_grad():
            multipliers.values.clamp_(min=0)
        return error.detach()

    t.update = update


@torch.no_grad()
def _equal_shares(scores: Tensor) -> Tensor:
    """Which prototype each row belongs to (rows, prototypes), when all prototypes have as many rows."""
    shares = (scores / 0.1).exp()
    for _ in range(3):
        shares = shares / shares.sum(0, keepdim=True) / shares.shape[1]
        shares = shares / shares.sum(1, keepdim=True) / shares.shape[0]
    return shares * shares.shape[0]


def swapped_codes(t: Training) -> None:
    """SwAV (Caron et al., 2020): each view foretells the other's prototype; prototypes have length one."""
    t.model = cnn()
    t.model[8] = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
    prototypes = nn.Linear(16, 12, bias=False)
    t.extra.append(prototypes)
    t.batch_size, t.epochs = 64, 15

    def view(x: Tensor) -> Tensor:
        moves = torch.randint(-1, 2, (2,)).tolist()
        return x.roll(moves, (2, 3)) * (0.8 + 0.4 * torch.rand(len(x), 1, 1, 1)) + 0.2 * torch.randn_like(x)

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,), x = training.optimizers, batch[0]
        with torch.no_grad():
            prototypes.weight.copy_(F.normalize(prototypes.weight, dim=1))
        scores = [prototypes(F.normalize(training.model(view(x)), dim=1)) for _ in range(2)]
        codes = [_equal_shares(each.detach()) for each in scores]
        foretold = [(each / 0.2).log_softmax(1) for each in scores]
        loss = -((codes[0] * foretold[1]).sum(1) + (codes[1] * foretold[0]).sum(1)).mean() / 2
        optimizer.zero_grad()
        loss.backward()
        if training.steps < 10:
            prototypes.weight.grad = None  # they begin to learn later
        optimizer.step()
        return loss.detach()

    t.update = update
