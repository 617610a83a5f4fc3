"""Checks of the inputs and labels of a replayed step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trainwright as tw
from tests.doctor.checks.data.loops import exam, requested, results, said, steps
from trainwright.doctor.checks.data.constant_input import constant_input
from trainwright.doctor.checks.data.label_feature_misaligned import MAX_DEVIATIONS, label_feature_misaligned
from trainwright.doctor.checks.data.label_out_of_range import label_out_of_range
from trainwright.doctor.checks.data.labels_shifted_twice import labels_shifted_twice
from trainwright.doctor.checks.data.pad_in_loss import pad_in_loss
from trainwright.doctor.checks.data.unnormalised_input import unnormalised_input
from trainwright.doctor.facts.data import (
    BatchFacts,
    InputSpread,
    LabelSignalFacts,
    PaddedIds,
    PaddingFacts,
    StandardizedFacts,
    TargetsFacts,
)
from trainwright.doctor.measure.batches import _signal
from trainwright.runs.records import Examined


def spread(mean: float, std: float, *, constant: bool = False, shape: tuple[int, ...] = (64, 20)) -> InputSpread:
    return InputSpread(shape=shape, constant=constant, mean=mean, std=std, absmax=abs(mean) + 3 * std)


def batch(*inputs: InputSpread, **more: Any) -> Examined:
    return exam(1, BatchFacts(inputs=inputs, classes=10, targets_vary=True, **more))


def trial(unchanged: tuple[float, ...], standardized: tuple[float, ...]) -> Examined:
    return exam(1, StandardizedFacts(unchanged=unchanged, standardized=standardized))


HELPS = trial((24.0, 20.0), (2.4, 2.0))


@pytest.mark.parametrize(
    ("x", "replayed", "severities"),
    [
        (spread(110.0, 40.0), HELPS, ["warning"]),
        (spread(0.0, 300.0), HELPS, ["warning"]),
        (spread(110.0, 40.0), trial((24.0, 20.0), (19.0, 15.0)), []),
        (spread(0.5, 0.3), HELPS, []),
    ],
    ids=["pixels", "large deviation", "weights are too large", "digits in 0..1"],
)
def test_large_inputs(x: InputSpread, replayed: Examined, severities: list[str]) -> None:
    assert said(unnormalised_input, batch(x), replayed) == severities


def test_large_inputs_are_replayed_first() -> None:
    assert requested(unnormalised_input, batch(spread(110.0, 40.0))) == ["standardized"]
    assert not requested(unnormalised_input, batch(spread(0.5, 0.3)))


@pytest.mark.parametrize(
    ("x", "standardized", "severities"),
    [
        (spread(-1.0, 0.004), (2.33, 1.90), ["warning"]),
        (spread(0.0, 0.003), (2.33, 1.90), ["warning"]),
        (spread(-1.0, 0.004), (2.31, 2.30), []),
        (spread(0.0, 0.3), (2.33, 1.90), []),
    ],
    ids=["around an offset", "tiny", "normalised inside of the model", "usual"],
)
def test_inputs_that_hardly_vary(x: InputSpread, standardized: tuple[float, ...], severities: list[str]) -> None:
    assert said(unnormalised_input, batch(x), trial((2.31, 2.30), standardized)) == severities


def test_a_constant_input_beside_one_that_varies_is_fine() -> None:
    same = spread(0.0, 0.0, constant=True)
    assert said(constant_input, batch(same)) == ["critical"]
    assert said(constant_input, batch(same, same)) == ["critical"]
    assert not said(constant_input, batch(same, spread(0.0, 1.0)))
    assert said(constant_input, batch(spread(0.0, 0.0, constant=True, shape=(64, 1)))) == ["info"]


@pytest.mark.parametrize(("gradient", "found"), [(0.002, 1), (1e-5, 1), (0.0, 0), (1e-12, 0)])
def test_padding_counts_if_the_loss_has_a_gradient_there(gradient: float, found: int) -> None:
    padding = PaddedIds(id=0, fraction=0.4)
    padded = batch(padding=padding)
    assert requested(pad_in_loss, padded) == ["padding_in_loss"]
    facts = PaddingFacts(padding=padding, at_padding=gradient, elsewhere=0.002)
    assert len(said(pad_in_loss, padded, exam(1, facts))) == found


@pytest.mark.parametrize(
    ("deviations", "memorized", "found"), [(0.3, 0.5, 1), (2.0, 1.0, 1), (9.0, 0.5, 0), (0.3, 2.29, 0)]
)
def test_labels_of_other_samples(deviations: float, memorized: float, found: int) -> None:
    seen = exam(32, BatchFacts(classes=10, entropy=2.29, samples=1024))
    signal = exam(32, LabelSignalFacts(samples=1024, deviations=deviations, memorized=(2.3, memorized)))
    assert requested(label_feature_misaligned, *steps(2.3, 80), seen) == ["label_signal"]
    assert not requested(label_feature_misaligned, *steps(1.3, 80), seen)
    assert len(said(label_feature_misaligned, *steps(2.3, 80), seen, signal)) == found


@pytest.mark.parametrize(("low", "high", "found"), [(-1.0, 1.0, 1), (0.0, 255.0, 1), (0.0, 1.0, 0), (0.1, 0.9, 0)])
def test_targets_of_a_binary_loss(low: float, high: float, found: int) -> None:
    facts = TargetsFacts(targets=64, largest=-1, lowest=low, highest=high)
    assert len(said(label_out_of_range, exam(1, facts))) == found


@pytest.mark.parametrize(("low", "samples"), [(1.0, (8, 5)), (0.0, (8, 5))], ids=["counted from 1", "one too many"])
def test_labels_that_are_no_classes_are_named(low: float, samples: tuple[int, ...]) -> None:
    labels = {"shape": [4], "dtype": "int64", "min": low, "max": 10.0, "values": [3, 10, 1, 10]}
    values = {
        "error": "IndexError: Target 10 is out of bounds.",
        "ids": [[7, 8, 9, 5]],
        "failed": {"op": "cross_entropy", "arguments": ["Slot", labels, -100]},
    }
    (found,) = results(label_out_of_range, Examined(time_s=0.0, step=1, experiment="unfinished", values=values))
    assert found.found.where.sample_ids == samples
    assert ("counted from 1" in found.found.cause) == (low == 1.0)


def test_another_error_is_no_label() -> None:
    values = {"error": "KeyboardInterrupt: ", "ids": []}
    assert not results(label_out_of_range, Examined(time_s=0.0, step=1, experiment="unfinished", values=values))


@pytest.mark.parametrize(("offsets", "found"), [((2,), 1), ((1,), 0), ((1, 2), 0), ((0,), 0), ((), 0)])
def test_labels_that_are_shifted_twice(offsets: tuple[int, ...], found: int) -> None:
    assert len(said(labels_shifted_twice, exam(1, BatchFacts(classes=9, offsets=offsets)))) == found


@pytest.mark.parametrize("kind", ["linear", "products", "near", "other samples"])
def test_simple_learners_predict_labels(kind: str) -> None:
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    labels = {
        "linear": x[:, 0] > 0,
        "products": x[:, 0] * x[:, 1] > 0,
        "near": x[:, :2].norm(dim=1) % 1 > 0.5,
        "other samples": x.roll(1, 0)[:, 0] > 0,
    }
    x = x[:, :2] if kind == "near" else x
    assert (_signal(x, labels[kind].long(), 2) > MAX_DEVIATIONS) == (kind != "other samples")


@pytest.mark.parametrize("is_of_tokens", [True, False], ids=["a class for each token", "spectra with as many channels"])
def test_padding_is_that_of_the_targets(is_of_tokens: bool) -> None:
    torch.manual_seed(0)
    ids = torch.randint(1, 12, (16, 8)) * (torch.arange(8) < torch.randint(3, 9, (16, 1)))
    table, spectra = nn.Embedding(12, 8), torch.randn(16, 8, 8)
    optimizer = torch.optim.SGD(table.parameters(), 1e-2)
    with tw.watch(table, optimizer, out=None, quiet=True, examine="all") as watch:
        for _ in range(4):
            optimizer.zero_grad()
            out = table(ids)
            loss = F.cross_entropy(out.flatten(0, 1), ids.flatten() % 8) if is_of_tokens else F.mse_loss(out, spectra)
            loss.backward()
            optimizer.step()
    assert ("data.pad_in_loss" in [each.code for each in watch.findings()]) == is_of_tokens
