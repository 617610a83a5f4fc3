"""Targets that are tokens of the input: not shifted, seen by the model, or without the end of texts."""

from __future__ import annotations

import linecache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainwright as tw
from tests.doctor.checks.data.loops import exam, requested, said
from trainwright.doctor.checks.loss.eos_ignored import eos_ignored
from trainwright.doctor.checks.loss.no_shift import no_shift
from trainwright.doctor.checks.model.future_leak import future_leak
from trainwright.doctor.facts.data import BatchFacts, InputSpread, TextEnds, TokenLoss, TokensFacts
from trainwright.doctor.measure.batches import padding
from trainwright.runs.records import Examined


def tokens(offset: int, **more: Any) -> Examined:
    loss = TokenLoss(**{"offset": offset, "fraction": 1.0, "sees": 0.0, "start": 12} | more)
    return exam(1, TokensFacts(losses=(loss,)))


BATCH = exam(1, BatchFacts(inputs=(InputSpread(shape=(8, 16), constant=False),), classes=30))
TABLE = exam(1, BatchFacts(inputs=(InputSpread(shape=(8, 16), constant=False, mean=0.0, std=1.0),), classes=30))


@pytest.mark.parametrize(
    ("record", "severities"),
    [
        (tokens(0), ["critical"]),
        (tokens(0, given=1.2), ["critical"]),
        (tokens(2), ["critical"]),
        (tokens(-1), ["info"]),
        (tokens(1), []),
        (tokens(0, given=0.0), []),
        (tokens(0, sees=0.4), []),
    ],
    ids=["same token", "depends on it", "shifted twice", "repeats", "next token", "model shifts", "autoencoder"],
)
def test_targets_that_are_not_the_next_token(record: Examined, severities: list[str]) -> None:
    assert said(no_shift, record) == severities


@pytest.mark.parametrize(
    ("record", "severities"),
    [
        (tokens(1, sees=0.4), ["critical"]),
        (tokens(1, sees=0.01), ["critical"]),
        (tokens(1), []),
        (tokens(0, sees=0.4), []),
        (tokens(1, sees=None), []),
    ],
)
def test_scores_that_see_later_tokens(record: Examined, severities: list[str]) -> None:
    assert said(future_leak, BATCH, record) == severities


class Block(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        summed = h.cumsum(1) / 8
        return h + summed.flip(1)  # leak


def test_a_leak_is_traced_to_its_line() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 16), Block(), nn.Linear(16, 30))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with tw.watch(model, optimizer, out=None, quiet=True, checks=["model.future_leak"]) as watch:
        for _ in range(8):
            ids = torch.randint(30, (8, 17))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
    (found,) = watch.findings()
    assert found.where.module == "1" and found.where.source is not None
    assert "# leak" in linecache.getline(__file__, int(found.where.source.rpartition(":")[2]))


class ReadsAll(nn.Module):
    """Predicts each token of ``ids`` (T, B) from those before it, or of (B, T) from those up to it."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embed, self.rnn, self.head = (
            nn.Embedding(30, 16),
            nn.GRU(16, 16, batch_first=batch_first),
            nn.Linear(16, 30),
        )

    def forward(self, ids: Tensor) -> Tensor:
        if self.batch_first:
            out: Tensor = self.head(self.rnn(self.embed(ids))[0])
            return out
        scores = self.head(self.rnn(self.embed(ids[:-1]))[0])
        return torch.cat([torch.zeros_like(scores[:1]), scores])


@pytest.mark.parametrize("batch_first", [False, True])
def test_the_first_dimension_may_be_time(batch_first: bool) -> None:
    torch.manual_seed(0)
    model = ReadsAll(batch_first=batch_first)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with tw.watch(model, optimizer, out=None, quiet=True, checks=["loss.no_shift", "model.future_leak"]) as watch:
        for _ in range(8):
            ids = torch.randint(30, (17, 8))
            optimizer.zero_grad()
            scores, targets = (model(ids), ids) if batch_first else (model(ids)[1:], ids[1:])
            nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
    assert [found.code for found in watch.findings()] == (["loss.no_shift"] if batch_first else [])


def test_tokens_are_examined_where_there_are_some() -> None:
    assert requested(future_leak, BATCH) == ["tokens"]
    assert not requested(future_leak, TABLE)


@pytest.mark.parametrize(
    ("counts", "severities"),
    [
        ({"within": 32}, ["warning"]),
        ({"attended": 32}, ["warning"]),
        ({}, []),
        ({"within": 32, "targets": 5}, []),
        ({"within": 32, "begins": True}, []),
        ({"within": 32, "begins": True, "is_end": True}, ["warning"]),
    ],
    ids=["between targets", "attended", "padding only", "is a target", "header of a turn", "begins and ends"],
)
def test_ends_that_are_never_a_target(counts: dict[str, int], severities: list[str]) -> None:
    ends = TextEnds(**{"id": 0, "within": 0, "attended": 0, "targets": 0, "rows": 32} | counts)
    assert said(eos_ignored, tokens(1, ends=ends)) == severities


def test_padding_fills_rows_to_different_lengths() -> None:
    ids = torch.randint(1, 9, (16, 12), generator=torch.Generator().manual_seed(0))
    lengths = torch.arange(16)[:, None] % 8 + 3
    found = padding(ids.masked_fill(torch.arange(12) >= lengths, 0))
    assert found is not None and found.id == 0
    assert padding(ids) is None
    assert padding(ids.masked_fill(torch.arange(12) >= 9, 0)) is None, "every row has the same length"
