"""Legal models that point, write or bind: a pointer network, a neural Turing machine, slots, sparse attention."""

from __future__ import annotations

from itertools import permutations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import RMSprop
from torch.utils.data import TensorDataset

from zoo.programs.training import Batch, Training


class PointerNet(nn.Module):
    """Logits (n, steps, places) for the place that comes next, where those before it are known."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.GRU(1, width, batch_first=True), nn.GRU(1, width, batch_first=True)
        self.of_place, self.of_state = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.score, self.begin = nn.Linear(width, 1, bias=False), nn.Parameter(torch.zeros(1, 1))

    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        seen, last = self.encoder(x.unsqueeze(2))
        before = torch.cat([self.begin.expand(len(x), 1), x.gather(1, order[:, :-1])], 1)
        state, _ = self.decoder(before.unsqueeze(2), last)
        both = self.of_place(seen).unsqueeze(1) + self.of_state(state).unsqueeze(2)
        chosen = F.one_hot(order, x.shape[1])
        return self.score(both.tanh()).squeeze(3).masked_fill((chosen.cumsum(1) - chosen).bool(), -torch.inf)


def pointer(t: Training) -> None:
    """A pointer network (Vinyals et al., 2015): numbers are sorted by pointing at them; none is chosen twice."""
    numbers = torch.rand(1024, 6)
    t.data, t.model, t.epochs = TensorDataset(numbers, numbers.argsort(1)), PointerNet(), 12

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(*batch).flatten(0, 1), batch[1].flatten())

    t.loss = loss


class TuringMachine(nn.Module):
    """A network with a memory, which it reads and writes by content and by place; returns logits (n, time, bits)."""

    def __init__(self, into: int, bits: int, places: int = 8, width: int = 8) -> None:
        super().__init__()
        self.places, self.width = places, width
        self.controller = nn.Sequential(nn.Linear(into + width, 64), nn.Tanh())
        self.heads = nn.Linear(64, 2 * (width + 6) + 2 * width)
        self.out = nn.Linear(64 + width, bits)

    def address(self, memory: Tensor, before: Tensor, head: Tensor) -> Tensor:
        """Where a head looks (n, places), from where it looked before."""
        key, strength, gate, sharpness, shift = head.split([self.width, 1, 1, 1, 3], 1)
        alike = F.cosine_similarity(memory, key.tanh().unsqueeze(1), dim=2)
        place = before.lerp((F.softplus(strength) * alike).softmax(1), gate.sigmoid())
        moved = torch.stack([place.roll(by, 1) for by in (-1, 0, 1)], 2) @ shift.softmax(1).unsqueeze(2)
        sharp = moved.squeeze(2).clamp(min=1e-8) ** (1 + F.softplus(sharpness))
        return sharp / sharp.sum(1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        memory = torch.full((len(x), self.places, self.width), 1e-6)
        reads = writes = F.one_hot(torch.zeros(len(x), dtype=torch.long), self.places).float()
        found, outs, size = torch.zeros(len(x), self.width), [], self.width + 6
        for now in x.unbind(1):
            hidden = self.controller(torch.cat([now, found], 1))
            reading, writing, erased, added = self.heads(hidden).split([size, size, self.width, self.width], 1)
            writes = self.address(memory, writes, writing)
            memory = memory * (1 - writes.unsqueeze(2) * erased.sigmoid().unsqueeze(1))
            memory = memory + writes.unsqueeze(2) * added.tanh().unsqueeze(1)
            reads = self.address(memory, reads, reading)
            found = (reads.unsqueeze(1) @ memory).squeeze(1)
            outs.append(self.out(torch.cat([hidden, found], 1)))
        return torch.stack(outs, 1)


def turing_machine(t: Training) -> None:
    """A neural Turing machine (Graves et al., 2014) learns to copy rows of bits through its memory."""
    bits = torch.randint(2, (1024, 3, 4)).float()
    shown, blank = F.pad(bits, (0, 1)), torch.zeros(len(bits), 3, 5)
    mark = F.one_hot(torch.full((len(bits), 1), 4), 5).float()
    t.data, t.model = TensorDataset(torch.cat([shown, mark, blank], 1), bits), TuringMachine(5, 4)
    t.optimizers_of = lambda training: [RMSprop(training.parameters(), lr=3e-3)]
    t.epochs = 10

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,) = training.optimizers
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(training.model(batch[0])[:, 4:], batch[1])
        loss.backward()
        nn.utils.clip_grad_value_(training.model.parameters(), 10.0)
        optimizer.step()
        return loss.detach()

    t.update = update


class Slots(nn.Module):
    """Slots begin at random, compete for the items of a set (n, items, 2), and each says where its thing is."""

    def __init__(self, slots: int, width: int = 32) -> None:
        super().__init__()
        self.slots, self.width = slots, width
        self.encoder = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.LayerNorm(width))
        self.mean, self.log_std = nn.Parameter(torch.randn(width)), nn.Parameter(torch.zeros(width))
        self.query = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width, bias=False))
        self.key, self.value = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.cell = nn.GRUCell(width, width)
        self.more = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, width))
        self.where = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        items = self.encoder(x)
        key, value = self.key(items) / self.width**0.5, self.value(items)
        state = self.mean + self.log_std.exp() * torch.randn(len(x), self.slots, self.width)
        for _ in range(3):
            share = (self.query(state) @ key.transpose(1, 2)).softmax(1) + 1e-8  # slots compete for each item
            update = (share / share.sum(2, keepdim=True)) @ value
            state = self.cell(update.flatten(0, 1), state.flatten(0, 1)).view_as(state)
            state = state + self.more(state)
        return self.where(state)


def slots(t: Training) -> None:
    """Slot attention (Locatello et al., 2020): three things are found among items, in whatever order they come."""
    things = 4 * torch.rand(1024, 3, 2) - 2
    items = things.repeat(1, 4, 1) + 0.1 * torch.randn(1024, 12, 2)
    t.data, t.model, t.epochs = TensorDataset(items, things), Slots(3), 20

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        found = model(batch[0])
        orders = torch.stack([found[:, list(order)] for order in permutations(range(3))])
        return (orders - batch[1]).square().mean((2, 3)).amin(0).mean()

    t.loss = loss


class Sparsemax(torch.autograd.Function):
    """The nearest point of the simplex, by the last dimension; its Jacobian is written by hand."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ordered = x.sort(-1, descending=True).values
        above = ordered.cumsum(-1) - 1
        count = torch.arange(1, x.shape[-1] + 1)
        size = (count * ordered > above).sum(-1, keepdim=True)
        p = (x - above.gather(-1, size - 1) / size).clamp(min=0)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        (p,) = ctx.saved_tensors
        held = (p > 0).to(p.dtype)
        return held * (gradient - (held * gradient).sum(-1, keepdim=True) / held.sum(-1, keepdim=True))


class SparseReader(nn.Module):
    """Reads a series, and looks at few of its places."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.key = nn.GRU(1, 24, batch_first=True), nn.Linear(24, 1)
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        states = self.cell(x)[0]
        shares = Sparsemax.apply(self.key(states).squeeze(2))
        return self.head(self.norm((shares.unsqueeze(2) * states).sum(1)))


def sparse_shares(t: Training) -> None:
    """Sparsemax (Martins and Astudillo, 2016): attention with zeros, and a loss whose gradient is a difference."""
    t.model, t.epochs = SparseReader(), 10

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        z, wanted = model(x), F.one_hot(y, 4).float()
        p = Sparsemax.apply(z).detach()  # at the maximum of p z - p p / 2, so it has no share in the gradient
        return ((p - wanted) * z).sum(1).mean() + (1 - p.square().sum(1)).mean() / 2

    t.loss = loss
