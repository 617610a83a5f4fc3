"""Legal training of language models: documents that share a row, prompts of vectors, a mixture of softmaxes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam
from torch.utils.data import TensorDataset

from zoo.host import TinyGPT, sequences
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
