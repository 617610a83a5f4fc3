"""Objectives of their own: risks that are climbed, penalties of slopes, ranks as a loss, likelihoods of an order."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.utils.data import TensorDataset

from zoo.host import TinyGPT
from zoo.programs.training import Batch, Training


class Translations(nn.Module):
    """How far a thing, moved by a relation, is from another thing."""

    def __init__(self, things: int, relations: int, size: int = 16) -> None:
        super().__init__()
        self.things, self.relations = nn.Embedding(things, size), nn.Embedding(relations, size)
        nn.init.uniform_(self.things.weight, -6 / size**0.5, 6 / size**0.5)
        nn.init.uniform_(self.relations.weight, -6 / size**0.5, 6 / size**0.5)
        with torch.no_grad():
            self.relations.weight.copy_(F.normalize(self.relations.weight, dim=1))

    def forward(self, triples: Tensor) -> Tensor:
        head, relation, tail = triples.unbind(1)
        return (self.things(head) + self.relations(relation) - self.things(tail)).norm(dim=1)


def translated(t: Training) -> None:
    """TransE (Bordes et al., 2013): true triples are nearer than corrupted ones by a margin; things have length one."""
    place, side = torch.arange(256), 16
    right, below = place // side * side + (place + 1) % side, (place + side) % 256
    twice = (place + 2 * side) % 256
    facts = torch.cat(
        [torch.stack([place, torch.full_like(place, k), to], 1) for k, to in enumerate((right, below, twice))]
    )
    t.data, t.model, t.epochs = TensorDataset(facts, torch.zeros(len(facts))), Translations(256, 3), 40
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=1.0)]

    @torch.no_grad()
    def to_the_sphere(training: Training) -> None:
        training.model.things.weight.copy_(F.normalize(training.model.things.weight, dim=1))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        true = batch[0]
        other, at_head = torch.randint(256, (len(true),)), torch.rand(len(true)) < 0.5
        false = true.clone()
        false[:, 0] = torch.where(at_head, other, true[:, 0])
        false[:, 2] = torch.where(at_head, true[:, 2], other)
        return F.relu(0.5 + model(true) - model(false)).mean()

    to_the_sphere(t)
    t.each_step.append(to_the_sphere)
    t.loss = loss


def never_below_zero(t: Training) -> None:
    """Non-negative PU learning (Kiryo et al., 2017): where the risk of the unlabelled is below zero, it is climbed."""
    x, y = t.data.tensors
    positive = y < 4
    prior, labelled = float(positive.float().mean()), positive & (torch.rand(len(y)) < 0.4)
    t.data, t.batch_size, t.epochs = TensorDataset(x, labelled), 128, 50
    t.model[-1] = nn.Linear(64, 1)

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,), (x, labelled) = training.optimizers, batch
        z = training.model(x).squeeze(1)
        known = z[labelled]
        of_known = prior * (-known).sigmoid().mean()
        of_rest = z.sigmoid().mean() - prior * known.sigmoid().mean()  # of all, less the share of the positive
        optimizer.zero_grad()
        (of_known + of_rest if of_rest >= 0 else -of_rest).backward()
        optimizer.step()
        return (of_known + of_rest.clamp(min=0)).detach()

    t.update = update


def environments(t: Training) -> None:
    """Invariant risk minimisation (Arjovsky et al., 2019): one scale of the logits is best in all environments."""
    x, y = t.data.tensors
    high, place = (y > 4).float(), torch.randint(2, (len(x),))
    misled = torch.rand(len(x)) < torch.where(place == 0, 0.1, 0.3)
    hint = torch.where(misled, 1 - high, high)
    x = torch.cat([x[:, :-1], 2 * hint.unsqueeze(1) - 1], 1)
    t.data, t.batch_size, t.epochs = TensorDataset(x, high, place), 128, 40
    t.model[-1] = nn.Linear(64, 1)
    t.optimizers_of = lambda training: [Adam(training.parameters(), lr=3e-3, weight_decay=1e-4)]

    def update(training: Training, batch: tuple[Tensor, ...]) -> Tensor:
        (optimizer,), (x, high, place) = training.optimizers, batch
        z, errors, penalties = training.model(x).squeeze(1), [], []
        for number in range(2):
            here, scale = place == number, torch.ones((), requires_grad=True)
            errors.append(F.binary_cross_entropy_with_logits(scale * z[here], high[here]))
            (slope,) = torch.autograd.grad(errors[-1], scale, create_graph=True)
            penalties.append(slope.square())
        error, penalty = torch.stack(errors).mean(), torch.stack(penalties).mean()
        weight = 1.0 if training.steps < 40 else 100.0  # first what helps at all, then only what helps everywhere
        optimizer.zero_grad()
        ((error + weight * penalty) / weight).backward()
        optimizer.step()
        return error.detach()

    t.update = update


class Ranks(torch.autograd.Function):
    """Ranks by the last dimension, the largest first; the gradient is the difference to the ranks of moved scores."""

    @staticmethod
    def ranks(scores: Tensor) -> Tensor:
        return scores.argsort(-1, descending=True).argsort(-1).to(scores.dtype)

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, scores: Tensor, step: float) -> Tensor:
        ranks = Ranks.ranks(scores)
        ctx.save_for_backward(scores, ranks)
        ctx.step = step
        return ranks

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        scores, ranks = ctx.saved_tensors
        return (Ranks.ranks(scores + ctx.step * gradient) - ranks) / ctx.step, None


def blackbox_ranks(t: Training) -> None:
    """Blackbox ranks (Rolínek et al., 2020): recall is the loss, though ranks are constant nearly everywhere."""
    t.model[8], t.batch_size, t.epochs = nn.Linear(8, 16), 64, 12

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        found = F.normalize(model(x), dim=1)
        same, itself = y.unsqueeze(1) == y, torch.eye(len(y), dtype=torch.bool)
        scores = found @ found.T + torch.where(same, -0.02, 0.02) - 1000.0 * itself
        over_all = Ranks.apply(scores, 1000.0)
        among_same = Ranks.apply(scores - 100.0 * ~same, 1000.0)
        before = (over_all - among_same)[same & ~itself]  # how many of other classes come first
        return (1 + (1 + before).log()).log().sum() / len(y)

    t.loss = loss


def replaced_tokens(t: Training) -> None:
    """ELECTRA (Clark et al., 2020): a small model fills gaps, the other tells which tokens were replaced."""
    t.model, small = TinyGPT(causal=False), TinyGPT(layers=1, causal=False)
    t.model.head = nn.Linear(32, 1)
    small.tokens = t.model.tokens
    t.extra.append(small)
    t.epochs = 15

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        ids = batch[0]
        gap = torch.rand(ids.shape) < 0.2
        logits = small(ids.masked_fill(gap, 0))[gap]
        filled = ids.clone()
        filled[gap] = torch.distributions.Categorical(logits=logits.detach()).sample()
        replaced = (filled != ids).float()
        told_apart = F.binary_cross_entropy_with_logits(model(filled).squeeze(2), replaced)
        return F.cross_entropy(logits, ids[gap]) + 50 * told_apart

    t.loss = loss


def proportional_hazards(t: Training) -> None:
    """DeepSurv (Katzman et al., 2018): the partial likelihood of Cox; a row is held against those at risk."""
    x, y = t.data.tensors
    time = -(1 - torch.rand(len(x))).log() * (-1.5 * y.squeeze(1)).exp()
    until = 4 * torch.rand(len(x))
    t.data = TensorDataset(x, torch.minimum(time, until), time <= until)
    t.batch_size, t.epochs = 128, 20

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        x, seen_until, happened = batch
        order = seen_until.argsort(descending=True)
        risk = model(x).squeeze(1)[order]
        at_risk = risk.logcumsumexp(0)
        return -(risk - at_risk)[happened[order]].mean()

    t.loss = loss


def preferred(t: Training) -> None:
    """DPO (Rafailov et al., 2023): of two answers one is better; the policy is held against its frozen first state."""
    ids = t.data.tensors[0]
    first = Adam(t.model.parameters(), lr=3e-3)
    for rows in ids.split(32) + ids.split(32):
        first.zero_grad()
        t.loss(t.model, (rows, rows)).backward()
        first.step()
    reference = copy.deepcopy(t.model).requires_grad_(False)
    worse = ids.clone()
    worse[:, 6:] = torch.where(torch.rand(len(ids), 10) < 0.3, torch.randint(1, 33, (len(ids), 10)), ids[:, 6:])
    t.data, t.lr, t.epochs = TensorDataset(ids, worse), 3e-4, 8

    def log_likelihood(model: nn.Module, ids: Tensor) -> Tensor:
        """Of the answer, the last ten tokens."""
        logs = model(ids[:, :-1]).log_softmax(2).gather(2, ids[:, 1:, None]).squeeze(2)
        return logs[:, 5:].sum(1)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        both = torch.cat(batch)
        with torch.no_grad():
            before = log_likelihood(reference, both)
        better, worse = (log_likelihood(model, both) - before).chunk(2)
        return -F.logsigmoid(0.1 * (better - worse)).mean()

    t.loss = loss
