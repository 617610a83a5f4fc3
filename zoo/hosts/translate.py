"""Sequence to sequence: an encoder, a decoder with attention, padding in both, teacher forcing."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Adam
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from zoo.hosts.report import Report, Watch
from zoo.hosts.worlds import BEGIN, END, PAD, TOKENS, phrases

Pair = tuple[Tensor, Tensor]


def collate(pairs: list[Pair]) -> tuple[Tensor, Tensor, Tensor]:
    """Sources, what the decoder is given, and what it is to say: each (n, length), padded."""
    begin, end = torch.tensor([BEGIN]), torch.tensor([END])
    sources = pad_sequence([source for source, _ in pairs], batch_first=True, padding_value=PAD)
    given = pad_sequence([torch.cat([begin, target]) for _, target in pairs], batch_first=True, padding_value=PAD)
    wanted = pad_sequence([torch.cat([target, end]) for _, target in pairs], batch_first=True, padding_value=PAD)
    return sources, given, wanted


class Attend(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x: Tensor, memory: Tensor, hidden: Tensor) -> Tensor:
        """``hidden`` (n, 1 or length of x, length of memory) is true where nobody may look."""
        q, k, v = self.query(x), self.key(memory), self.value(memory)
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        weights = torch.softmax(scores.masked_fill(hidden, -1e9), dim=-1)
        return weights @ v


class Translator(nn.Module):
    def __init__(self, d: int = 48) -> None:
        super().__init__()
        self.source = nn.Embedding(TOKENS, d, padding_idx=PAD)
        self.target = nn.Embedding(TOKENS, d, padding_idx=PAD)
        self.places = nn.Embedding(10, d)
        self.encoder = nn.GRU(d, d, batch_first=True)
        self.decoder = nn.GRU(d, d, batch_first=True)
        self.cross = Attend(d)
        self.norm = nn.LayerNorm(2 * d)
        self.head = nn.Linear(2 * d, TOKENS)

    def encode(self, sources: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        padding = sources == PAD
        lengths = (~padding).sum(dim=1)
        places = self.places(torch.arange(sources.shape[1]))
        memory, _ = self.encoder(self.source(sources) + places)
        last = memory[torch.arange(len(sources)), lengths - 1]
        return memory, last, padding

    def forward(self, sources: Tensor, given: Tensor) -> Tensor:
        memory, last, padding = self.encode(sources)
        places = self.places(torch.arange(given.shape[1]))
        states, _ = self.decoder(self.target(given) + places, last.unsqueeze(0).contiguous())
        read = self.cross(states, memory, padding.unsqueeze(1))
        return self.head(self.norm(torch.cat([states, read], dim=-1)))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor], smoothing: float = 0.0) -> Tensor:
    sources, given, wanted = batch
    logits = model(sources, given)
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=PAD, label_smoothing=smoothing)


@torch.no_grad()
def evaluate(model: nn.Module, batches: DataLoader) -> tuple[float, float]:
    model.eval()
    total, right, words = 0.0, 0, 0
    for batch in batches:
        sources, given, wanted = batch
        real = wanted != PAD
        total += loss_of(model, batch).item() * real.sum().item()
        right += ((model(sources, given).argmax(dim=-1) == wanted) & real).sum().item()
        words += real.sum().item()
    return total / words, right / words


def train(watch: Watch, seed: int, epochs: int = 8) -> Report:
    torch.manual_seed(seed)
    data = phrases(seed, 800)
    batches = DataLoader(data[:640], batch_size=64, shuffle=True, collate_fn=collate)
    held_out = DataLoader(data[640:], batch_size=80, collate_fn=collate)

    model = Translator()
    optimizer = Adam(model.parameters(), lr=6e-3, betas=(0.9, 0.98))
    scheduler = LambdaLR(optimizer, lambda step: min((step + 1) / 10, (10 / (step + 1)) ** 0.5))
    losses, shown = [], (0.0, 0.0)
    with watch(model, optimizer, loader=batches, scheduler=scheduler):
        for _ in range(epochs):
            model.train()
            total, words = 0.0, 0
            for batch in batches:
                loss = loss_of(model, batch, smoothing=0.05)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                count = (batch[2] != PAD).sum().item()
                total += loss.item() * count
                words += count
            losses.append(total / words)
            shown = evaluate(model, held_out)
    return Report(model, {"loss": shown[0], "accuracy": shown[1]}, losses)
