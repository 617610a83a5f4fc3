"""Losses, layers and data that nobody may look at while laws are written: they are measured at the end."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer, SparseAdam
from torch.utils.data import TensorDataset

from zoo.host import TinyGPT, images, sequences
from zoo.programs.training import Batch, Training


def _packed(documents: list[Tensor], length: int) -> Batch:
    """Rows of ``length`` ids, each filled first-fit with whole documents; of which document an id is, 0 for padding."""
    rows: list[list[Tensor]] = []
    for document in sorted(documents, key=len, reverse=True):
        free = next((row for row in rows if sum(map(len, row)) + len(document) <= length), None)
        if free is None:
            rows.append(free := [])
        free.append(document)
    ids, numbers = torch.zeros(2, len(rows), length, dtype=torch.long)
    for at, row in enumerate(rows):
        filled = torch.cat(row)
        ids[at, : len(filled)] = filled
        numbers[at, : len(filled)] = torch.arange(1, len(row) + 1).repeat_interleave(torch.tensor([*map(len, row)]))
    return ids, numbers


class DocumentGPT(nn.Module):
    """Several documents in a row: none sees another, and each counts its positions from 0."""

    def __init__(self, vocab: int = 33, longest: int = 32, d: int = 32) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, d, padding_idx=0), nn.Embedding(longest, d)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(d, 2, 64, 0.0, "gelu", batch_first=True, norm_first=True) for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1])
        begins = numbers != F.pad(numbers, (1, 0), value=-1)[:, :-1]
        x = self.tokens(ids) + self.positions(at - (begins * at).cummax(1).values)
        seen = (numbers.unsqueeze(2) == numbers.unsqueeze(1)).tril()
        hidden = ~seen.repeat_interleave(2, 0)  # for each of two heads
        for layer in self.layers:
            x = layer(x, src_mask=hidden)
        return self.head(self.norm(x))


def packed_documents(t: Training) -> None:
    """Packing without cross-contamination (Krell et al., 2021): documents share a row, and do not see each other."""
    lengths = torch.randint(5, 17, (1200,)).tolist()
    documents = [ids[:length] for ids, length in zip(sequences(t.seed, 1200), lengths)]
    t.data, t.model = TensorDataset(*_packed(documents, 32)), DocumentGPT()
    t.batch_size, t.epochs = 16, 6

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        ids, numbers = batch
        same = (numbers[:, 1:] == numbers[:, :-1]) & (numbers[:, 1:] > 0)
        wanted = ids[:, 1:].masked_fill(~same, -100)
        return F.cross_entropy(model(ids, numbers)[:, :-1].flatten(0, 1), wanted.flatten(), ignore_index=-100)

    t.loss = loss


class Prompted(nn.Module):
    """A language model that stands still, with vectors before its tokens that learn."""

    def __init__(self, body: TinyGPT, length: int) -> None:
        super().__init__()
        self.body = body.requires_grad_(False)
        self.prompt = nn.Parameter(body.tokens.weight[torch.randint(1, 33, (length,))].clone())

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.cat([self.prompt.expand(len(ids), -1, -1), self.body.tokens(ids)], 1)
        x = x + self.body.positions(torch.arange(x.shape[1]))
        for block in self.body.blocks:
            x = block(x)
        return self.body.head(self.body.norm(x))[:, len(self.prompt) :]


def _counted(steps: Tensor) -> Tensor:
    """A row of 12 ids for each step: one counts by it, modulo 32."""
    start = torch.randint(32, (len(steps), 1))
    return (start + steps.unsqueeze(1) * torch.arange(12)) % 32 + 1


def prompt_tuned(t: Training) -> None:
    """Prompt tuning (Lester et al., 2021): a pretrained model is frozen; a few vectors say what is wanted of it."""
    body, steps, orders = TinyGPT(), torch.tensor([1, 5, 11, 18]), torch.randint(1, 33, (4, 4))
    first = Adam(body.parameters(), lr=5e-3)
    for _ in range(250):  # four orders in words, each with what it asks for
        kind = torch.randint(4, (48,))
        ids = torch.cat([orders[kind], _counted(steps[kind])], 1)
        first.zero_grad()
        F.cross_entropy(body(ids)[:, 4:-1].flatten(0, 1), ids[:, 5:].flatten()).backward()
        first.step()
    ids = _counted(steps[1].expand(640))
    t.data, t.model, t.epochs = TensorDataset(ids, ids), Prompted(body, 4), 5
    t.optimizers_of = lambda training: [Adam(training.parameters(), lr=5e-2)]


class SoftmaxMixture(nn.Module):
    """The log of a weighted mean of softmaxes, each of a context vector of its own."""

    def __init__(self, d: int, vocab: int, parts: int) -> None:
        super().__init__()
        self.weights, self.contexts = nn.Linear(d, parts, bias=False), nn.Linear(d, parts * d)
        self.out = nn.Linear(d, vocab)

    def forward(self, x: Tensor) -> Tensor:
        contexts = self.contexts(x).tanh().unflatten(-1, (-1, x.shape[-1]))
        each = self.out(contexts).log_softmax(-1)  # (..., parts, vocab)
        return (self.weights(x).log_softmax(-1).unsqueeze(-1) + each).logsumexp(-2)


def mixed_softmaxes(t: Training) -> None:
    """Mixture of softmaxes (Yang et al., 2018): a language model whose log-probabilities are of a higher rank."""
    t.model.head, t.epochs = SoftmaxMixture(32, 33, 4), 6

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        ids = batch[0]
        return F.nll_loss(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    t.loss = loss


def two_dropouts(t: Training) -> None:
    """R-Drop (Liang et al., 2021): two passes with other dropouts shall agree, by the divergence in both directions."""
    t.model.norm = nn.Sequential(nn.LayerNorm(24), nn.Dropout(0.3))
    t.epochs = 8

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        logits = model(torch.cat([x, x]))
        one, other = logits.log_softmax(1).chunk(2)
        apart = F.kl_div(one, other, log_target=True, reduction="batchmean")
        apart = apart + F.kl_div(other, one, log_target=True, reduction="batchmean")
        return F.cross_entropy(logits, torch.cat([y, y])) + 0.5 * apart

    t.loss = loss


def proxies(t: Training) -> None:
    """Proxy-NCA (Movshovitz-Attias et al., 2017): near the proxy of its class, far from the proxies of the others."""
    x, y = images(t.seed, 960, classes=12)
    t.data = TensorDataset(x[y < 8], y[y < 8])  # the others are never seen
    t.model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 16)
    )
    t.extra.append(nn.ParameterList([nn.Parameter(torch.randn(8, 16))]))
    t.epochs = 8
    t.optimizers_of = lambda training: [
        Adam([{"params": training.model.parameters()}, {"params": training.extra[0].parameters(), "lr": 3e-2}], lr=1e-3)
    ]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        rows, near = 3 * F.normalize(model(batch[0]), dim=1), 3 * F.normalize(t.extra[0][0], dim=1)
        apart = (rows.unsqueeze(1) - near).square().sum(2)
        own = F.one_hot(batch[1], 8).bool()
        return (apart[own] + (-apart).masked_fill(own, -torch.inf).logsumexp(1)).mean()

    t.loss = loss


class Ratings(nn.Module):
    """What a user gives a thing: by the product of two vectors, and by a network on both; gradients of rows alone."""

    def __init__(self, users: int, things: int, d: int = 8) -> None:
        super().__init__()
        self.users, self.things = nn.Embedding(users, d, sparse=True), nn.Embedding(things, d, sparse=True)
        for table in (self.users, self.things):
            nn.init.normal_(table.weight, std=0.3)
        self.deep = nn.Sequential(nn.Linear(2 * d, 16), nn.ReLU(), nn.Linear(16, d), nn.ReLU())
        self.out = nn.Linear(2 * d, 1)

    def forward(self, pairs: Tensor) -> Tensor:
        user, thing = self.users(pairs[:, 0]), self.things(pairs[:, 1])
        return self.out(torch.cat([user * thing, self.deep(torch.cat([user, thing], 1))], 1))


def sparse_rows(t: Training) -> None:
    """Neural matrix factorisation (He et al., 2017): sparse embeddings with a lazy Adam, the rest with another."""
    pairs = torch.cartesian_prod(torch.arange(60), torch.arange(40))[torch.randperm(2400)]
    tastes, kinds = torch.randn(60, 3), torch.randn(40, 3)
    ratings = (tastes[pairs[:, 0]] * kinds[pairs[:, 1]]).sum(1, keepdim=True) + 0.2 * torch.randn(2400, 1)
    t.data, t.model, t.epochs = TensorDataset(pairs[:2000], ratings[:2000]), Ratings(60, 40), 12

    def both(training: Training) -> list[Optimizer]:
        model = training.model
        dense = [*model.deep.parameters(), *model.out.parameters()]
        return [SparseAdam([model.users.weight, model.things.weight], lr=1e-2), Adam(dense, lr=3e-3)]

    def update(training: Training, batch: Batch) -> Tensor:
        for optimizer in training.optimizers:
            optimizer.zero_grad()
        loss = training.loss(training.model, batch)
        loss.backward()
        for optimizer in training.optimizers:
            optimizer.step()
        return loss.detach()

    t.optimizers_of, t.update = both, update
