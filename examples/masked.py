"""Masked pre-training (BERT, Devlin et al. 2019): the loss hides tokens, and is weighted by their number."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw

VOCABULARY, LENGTH, MASK = 12, 16, 0


class Encoder(nn.Module):
    """A transformer that sees both sides."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.token(ids) + self.place.weight))


def sequences(count: int = 512) -> Tensor:
    """Numbers that count up from 1 to 11 and begin again, from a random one on."""
    torch.manual_seed(0)
    return (torch.randint(VOCABULARY - 1, (count, 1)) + torch.arange(LENGTH)) % (VOCABULARY - 1) + 1


def loss(model: nn.Module, batch: tuple[Tensor]) -> tw.Loss:
    (ids,) = batch
    hidden = torch.rand(ids.shape, device=ids.device) < 0.15
    logits = model(ids.masked_fill(hidden, MASK))[hidden]
    return tw.Loss(
        F.cross_entropy(logits, ids[hidden], reduction="sum"),
        hidden.sum(),
        {"accuracy": (logits.argmax(-1) == ids[hidden]).sum()},
    )


def main(steps: int = 200, resume: Path | None = None) -> tw.Result:
    data = sequences()
    return tw.fit(
        Encoder(),
        (data,),
        loss,
        batch=32,
        accumulation=2,
        steps=steps,
        lr=3e-3,
        schedule="cosine",
        clip=1.0,
        resume=resume,
    )


if __name__ == "__main__":
    main()
