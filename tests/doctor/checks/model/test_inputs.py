"""Arguments of a model that change nothing, and attention without positions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw

CODES = {"model.input_without_effect", "model.order_ignored"}


class Denoiser(nn.Module):
    def __init__(self, use: str) -> None:
        super().__init__()
        self.body, self.times, self.head = nn.Linear(2, 16), nn.Embedding(20, 16), nn.Linear(16, 2)
        self.gate = nn.Parameter(torch.zeros(16))
        self.use = use

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h, time = self.body(x), self.times(t)
        if self.use == "always" or (self.use == "at random" and torch.rand(()) < 0.5):
            h = h + time
        elif self.use == "gated":
            h = h + self.gate * time
        out: Tensor = self.head(h.relu())
        return out


class Reader(nn.Module):
    def __init__(self, positions: str) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(20, 16), nn.Linear(16, 2)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.attention = nn.TransformerEncoder(layer, 1) if positions != "bag" else nn.Identity()
        self.places = nn.Parameter(torch.zeros(1, 12, 16)) if positions in ("learned", "unused") else None
        self.is_used = positions == "learned"

    def forward(self, ids: Tensor) -> Tensor:
        h = self.tokens(ids)
        if self.places is not None and self.is_used:
            h = h + self.places
        out: Tensor = self.head(self.attention(h).mean(1))
        return out


def found(model: nn.Module, *inputs: Tensor, classes: bool = False) -> list[tuple[str, str, str]]:
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    rows = len(inputs[0])
    target = torch.randint(2, (rows,)) if classes else torch.randn(rows, 2)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="all") as watch:
        for at in torch.arange(rows).split(16):
            optimizer.zero_grad()
            out = model(*(each[at] for each in inputs))
            (F.cross_entropy(out, target[at]) if classes else F.mse_loss(out, target[at])).backward()
            optimizer.step()
    assert watch.session.failures == []
    return [(each.code, each.symptom, each.severity) for each in watch.findings() if each.code in CODES]


@pytest.mark.slow
@pytest.mark.parametrize("use", ["never", "always", "gated", "at random"])
def test_an_argument_that_is_never_used_is_found_by_its_name(use: str) -> None:
    """A gate that begins at 0, and an argument that some steps leave out, are used."""
    torch.manual_seed(0)
    seen = found(Denoiser(use), torch.randn(128, 2), torch.randint(20, (128,)))
    assert [code for code, _, _ in seen] == (["model.input_without_effect"] if use == "never" else [])
    assert use != "never" or seen[0][1].endswith("argument t")


class OfBatch(nn.Module):
    """Reads one entry of a batch that has others, as a training module of a library does."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.head(batch["x"])
        return out


@pytest.mark.slow
def test_entries_of_a_batch_that_the_model_does_not_read_are_only_noted() -> None:
    model = OfBatch()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="all") as watch:
        for at in torch.arange(128).split(16):
            optimizer.zero_grad()
            F.mse_loss(model({"x": torch.randn(16, 2), "ids": at}), torch.randn(16, 2)).backward()
            optimizer.step()
    (noted,) = [each for each in watch.findings() if each.code in CODES]
    assert noted.severity == "info" and "batch['ids']" in noted.symptom


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["none", "unused", "learned", "bag"])
def test_attention_without_positions_is_found(positions: str) -> None:
    """Positions that begin at 0 count, a mean of embeddings has no attention, and without a table it may be a set."""
    torch.manual_seed(0)
    seen = found(Reader(positions), torch.randint(20, (128, 12)), classes=True)
    expected = {"none": ["info"], "unused": ["warning"]}.get(positions, [])
    assert [(code, severity) for code, _, severity in seen] == [("model.order_ignored", each) for each in expected]


class OfVectors(nn.Module):
    """Attention over vectors, with a table of positions that is read at one place or at all places, or without one."""

    def __init__(self, positions: str) -> None:
        super().__init__()
        self.positions = positions
        self.attend = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 2)
        if positions == "queries":
            self.table = nn.Parameter(torch.randn(1, 16, 8))
        elif positions != "none":
            self.register_buffer("table", torch.randn(1, 16, 8))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if self.positions == "queries":
            x = torch.cat([x, self.table.expand(len(x), -1, -1)], 1)
        elif self.positions != "none":
            x = x + (self.table[:, length] if self.positions == "one place" else self.table[:, :length])
        out: Tensor = self.head(self.attend(x).mean(1))
        return out


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["one place", "all places", "queries", "none"])
def test_attention_over_vectors_without_positions_is_found(positions: str) -> None:
    torch.manual_seed(0)
    seen = found(OfVectors(positions), torch.randn(128, 12, 8), classes=True)
    expected = {"none": ["info"], "queries": ["info"], "one place": ["warning"]}.get(positions, [])
    assert [(code, severity) for code, _, severity in seen] == [("model.order_ignored", each) for each in expected]
