"""Faults of the labels are found in a language model whose loss is made in chunks as they are where it is whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import trainwright as tw
from tests.watching.loops import exams
from trainwright.commands.check.first_batch import LossRecorder
from trainwright.engine import chunked
from trainwright.engine.chunked import chunked_cross_entropy
from trainwright.engine.losses import language_model
from trainwright.errors import DataError
from trainwright.models.gpt import gpt
from trainwright.replay import classified

VOCABULARY, LENGTH, BATCH = 33, 16, 16


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks in the loss, and fewer rows to look at than there are."""
    monkeypatch.setitem(chunked.CHUNK_BYTES, "cpu", 4 * VOCABULARY * 100)
    monkeypatch.setattr(classified, "MAX_SCORES", VOCABULARY * 100)


def texts(n: int = 512) -> Tensor:
    """(n, LENGTH + 2) of a noisy cycle."""
    start = torch.randint(1, VOCABULARY, (n, 1))
    ids = (start - 1 + 3 * torch.arange(LENGTH + 2)) % (VOCABULARY - 1) + 1
    noise = torch.rand(ids.shape) < 0.1
    return torch.where(noise, torch.randint(1, VOCABULARY, ids.shape), ids)


def right(ids: Tensor) -> tuple[Tensor, Tensor]:
    return ids[:, :LENGTH], ids[:, 1 : LENGTH + 1]


def unshifted(ids: Tensor) -> tuple[Tensor, Tensor]:
    return ids[:, :LENGTH], ids[:, :LENGTH]


def shifted_twice(ids: Tensor) -> tuple[Tensor, Tensor]:
    return ids[:, :LENGTH], ids[:, 2:]


def all_ignored(ids: Tensor) -> tuple[Tensor, Tensor]:
    return ids[:, :LENGTH], torch.full((len(ids), LENGTH), -100)


def beyond_the_classes(ids: Tensor) -> tuple[Tensor, Tensor]:
    x, target = right(ids)
    target = target.clone()
    target[3, 5] = VOCABULARY
    return x, target


def padded(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of different length, filled up with 0, which is a target as well."""
    ids = ids.clone()
    for row in ids:
        row[int(torch.randint(4, LENGTH, ())) :] = 0
    return right(ids)


def of_turns(ids: Tensor) -> tuple[Tensor, Tensor]:
    """0 ends each of two turns and fills rows up; it is never a target."""
    rows = torch.zeros_like(ids)
    for row, own in zip(rows, ids, strict=True):
        first, second = torch.randint(3, 8, (2,)).tolist()
        row[:first], row[first + 1 : first + 1 + second] = own[:first], own[first : first + second]
    x, target = right(rows)
    return x, target.masked_fill(target == 0, -100)


class SeesAll(TorchFunctionMode):
    """No attention is causal."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") == "scaled_dot_product_attention":
            kwargs["is_causal"] = False
        return func(*args, **kwargs)


class Peeking(nn.Module):
    """A language model that sees what it is to predict."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own, self.head, self.logit_softcap = own, own.head, 0.0

    def forward(self, ids: Tensor, *, hidden: bool = False) -> Any:
        with SeesAll():
            return self.own(ids, hidden=hidden)


def trained(loss_of: Callable[[nn.Module, Tensor], Tensor], ids: Tensor, *, model: nn.Module) -> tw.Watch:
    """The watch of the training. Ends where the loss raises."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with suppress(DataError), tw.watch(model, optimizer, out=None, quiet=True) as watch:
        for batch in ids.split(BATCH):
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    assert watch.session.failures == []
    return watch


def watched(loss_of: Callable[[nn.Module, Tensor], Tensor], ids: Tensor, *, model: nn.Module) -> list[Any]:
    """What the doctor says of training, most important first."""
    return list(trained(loss_of, ids, model=model).findings())


def of_tokens(
    feed: Callable[[Tensor], tuple[Tensor, Tensor]],
    *,
    chunked: bool,
    peeks: bool = False,
    sign: float = 1.0,
    steps: int = 2,
) -> list[Any]:
    """Of some steps of a language model; its faults are found in the first."""

    def step(model: nn.Module, ids: Tensor) -> Tensor:
        made = language_model(model, feed(ids), chunked=chunked)
        return sign * made.total / made.weight

    torch.manual_seed(5)
    model: nn.Module = gpt(vocab_size=VOCABULARY, block_size=LENGTH, layers=1, heads=2, d_model=32)
    return watched(step, texts(steps * BATCH), model=Peeking(model) if peeks else model)


def said(found: list[Any]) -> list[tuple[str, int]]:
    return [(each.code, each.step) for each in found]


def better(found: list[Any]) -> list[bool]:
    """Whether the remedies that were tried helped."""
    return ["no better" not in each.result for each in found[0].tried]


FAULTS: list[tuple[Callable[[Tensor], tuple[Tensor, Tensor]], str]] = [
    (unshifted, "loss.no_shift"),
    (shifted_twice, "data.labels_shifted_twice"),
    (all_ignored, "precision.division_by_zero"),
    (beyond_the_classes, "data.label_out_of_range"),
    (padded, "data.pad_in_loss"),
    (of_turns, "loss.eos_ignored"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("feed", "code"), FAULTS, ids=lambda each: getattr(each, "__name__", ""))
def test_faults_of_the_targets(feed: Callable[[Tensor], tuple[Tensor, Tensor]], code: str) -> None:
    whole, parts = of_tokens(feed, chunked=False), of_tokens(feed, chunked=True)
    assert said(parts) == said(whole)
    assert said(parts)[0] == (code, 1)
    assert better(parts) == better(whole)


@pytest.mark.slow
def test_turns_that_begin_with_the_padding_token_are_healthy() -> None:
    def with_header(ids: Tensor) -> tuple[Tensor, Tensor]:
        ids, target = of_turns(ids)
        ids[:, 0] = ids[0, -1]
        return ids, target

    assert "loss.eos_ignored" not in [code for code, _ in said(of_tokens(with_header, chunked=False))]


@pytest.mark.slow
def test_a_model_that_sees_what_it_is_to_predict() -> None:
    whole, parts = of_tokens(right, chunked=False, peeks=True), of_tokens(right, chunked=True, peeks=True)
    assert said(parts) == said(whole) == [("model.future_leak", 1)]
    assert parts[0].evidence[0].seen == pytest.approx(whole[0].evidence[0].seen, rel=1e-4)


@pytest.mark.slow
def test_a_loss_that_is_maximised() -> None:
    assert said(of_tokens(right, chunked=True, sign=-1.0)) == [("loss.wrong_sign", 1)]


@pytest.mark.slow
def test_nothing_is_said_of_a_loss_that_is_right() -> None:
    assert said(of_tokens(right, chunked=True, steps=8)) == []


ROWS = 8 * 2 * 2
"""Of 8 steps of two micro-batches of two rows."""


def accumulated(*, by_all: bool) -> list[Any]:
    """Of two micro-batches a step, with few tokens or many, each with a mean of its own or weighed by the tokens."""
    torch.manual_seed(5)
    model = gpt(vocab_size=VOCABULARY, block_size=LENGTH, layers=1, heads=2, d_model=32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    ids, target = right(texts(ROWS))
    ids, target = ids.contiguous(), target.clone()
    length = torch.where(torch.rand(ROWS, 1) < 0.5, torch.randint(3, 6, (ROWS, 1)), torch.randint(12, 17, (ROWS, 1)))
    target[torch.arange(LENGTH) >= length] = -100
    pairs = list(zip(ids.split(2), target.split(2), strict=True))
    with tw.watch(model, optimizer, out=None, quiet=True) as watch:
        for begin in range(0, len(pairs), 2):
            window = [(x.clone(), y.clone()) for x, y in pairs[begin : begin + 2]]
            count = sum((y >= 0).sum() for _, y in window)
            for each in window:
                made = language_model(model, each, chunked=True)
                (made.total / count if by_all else made.total / made.weight / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert watch.session.failures == []
    return list(watch.findings())


@pytest.mark.slow
def test_means_of_unequal_micro_batches() -> None:
    assert said(accumulated(by_all=False))[0][0] == "gradient.accumulation_token_weighting"
    assert said(accumulated(by_all=True)) == []


def test_the_first_batch_is_recorded_alike_by_a_check() -> None:
    """The loss of a guess, and the classes; of a sample of the rows."""
    model, (ids, target) = gpt(vocab_size=VOCABULARY, block_size=LENGTH, layers=1, heads=2, d_model=32), right(texts(8))
    calls = []
    for parts in (False, True):
        with LossRecorder() as recorder:
            language_model(model, (ids, target.masked_fill(target == 3, -100)), chunked=parts)
        calls.append(recorder.calls[0])
    whole, sample = calls
    assert sample.op == whole.op and sample.classes == whole.classes == VOCABULARY
    assert len(sample.target) == 64 == len(sample.rows()) and len(whole.target) == 128
    torch.testing.assert_close(sample.output, whole.output[::2])
    assert torch.equal(sample.target, whole.target[::2])
    assert sample.value() == pytest.approx(math.log(VOCABULARY), rel=0.05)


CLASSES = 6


@pytest.mark.slow
def test_labels_of_whole_texts_are_known_as_classes() -> None:
    """A class of each text, read from the last place, by a loss that is called by hand."""

    def step(parts: bool) -> Callable[[Any, Tensor], Tensor]:
        def loss(model: Any, batch: Tensor) -> Tensor:
            ids, label = batch[:, :4], batch[:, 4]
            if parts:
                return chunked_cross_entropy(model(ids, hidden=True)[:, -1], model.head.weight, label) / len(label)
            return F.cross_entropy(model(ids)[:, -1], label)

        return loss

    found = []
    for parts in (False, True):
        torch.manual_seed(5)
        model = gpt(vocab_size=CLASSES, block_size=4, layers=1, heads=2, d_model=32)
        watch = trained(step(parts), torch.randint(CLASSES, (2 * BATCH, 5)), model=model)
        (facts, *_) = exams(watch, "batch")
        found.append((facts["classes"], facts["entropy"]))
    assert found[0] == found[1] and found[0][0] == CLASSES and found[0][1] > 1.0
