"""Sequence to sequence: an encoder and a decoder with teacher forcing; padding is not counted."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw

VOCABULARY, LENGTH, PAD, BEGIN = 12, 7, 0, 1


class Translator(nn.Module):
    """Two GRUs; the decoder begins with what the encoder ends with."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width, padding_idx=PAD)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source: Tensor, so_far: Tensor) -> Tensor:
        _, memory = self.encoder(self.token(source))
        output, _ = self.decoder(self.token(so_far), memory)
        return self.head(output)


def reversals(count: int = 512) -> tuple[Tensor, Tensor]:
    """Words of 3 to LENGTH letters, and the same backwards; both padded."""
    torch.manual_seed(0)
    source, target = torch.full((2, count, LENGTH), PAD)
    for row, length in enumerate(torch.randint(3, LENGTH + 1, (count,)).tolist()):
        word = torch.randint(2, VOCABULARY, (length,))
        source[row, :length], target[row, :length] = word, word.flip(0)
    return source, target


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tw.Loss:
    source, target = batch
    so_far = torch.cat([torch.full_like(target[:, :1], BEGIN), target[:, :-1]], dim=1)
    logits = model(source, so_far)
    total = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum")
    return tw.Loss(total, (target != PAD).sum())


def main(steps: int = 300, resume: Path | None = None) -> tw.Result:
    data = reversals()
    return tw.fit(
        Translator(),
        data,
        loss,
        batch=32,
        accumulation=2,
        steps=steps,
        lr=5e-3,
        schedule="cosine",
        clip=1.0,
        resume=resume,
    )


if __name__ == "__main__":
    main()
