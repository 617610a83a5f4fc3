"""The demo: its budget counts from the first step to the end, and nearly all of it is training."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from trainwright.commands.demo import (
    FIRST_TOKENS,
    MIN_SAMPLE_TOKENS,
    PROMPT,
    SAMPLE_TOKENS,
    SampleWriter,
    _FinalToo,
    demo,
)
from trainwright.training.job import Job


@pytest.mark.slow
def test_the_budget_counts_from_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said, settings = io.StringIO(), ["log.doctor=false", "model.args.width=4"]
    result = demo("digits", budget="2s", settings=settings, console=Console(file=said, width=200))
    assert result.ending == "finished" and result.state is not None
    assert 1.0 <= result.state.elapsed_s < 2.0
    assert "length      2 s by the clock: from the first step on: training, evaluation" in said.getvalue()


class Characters(nn.Module):
    """Writes one character for ever, and counts how often it is called."""

    calls = 0

    def forward(self, ids_BT: Tensor) -> Tensor:
        self.calls += 1
        return torch.zeros(*ids_BT.shape, 3)


def writer(within_s: float | None) -> tuple[SampleWriter, Characters]:
    model = Characters()
    text = SimpleNamespace(encode=lambda text: [0] * len(text), decode=lambda ids: "x" * len(ids))
    job = SimpleNamespace(
        state=SimpleNamespace(model=model),
        parts=SimpleNamespace(train=SimpleNamespace(dataset=text)),
        device=torch.device("cpu"),
        precision=SimpleNamespace(autocast=torch.no_grad),
        loaded=SimpleNamespace(within_s=within_s),
    )
    return SampleWriter(cast("Job", job)), model


def test_a_sample_is_as_long_as_its_share_of_the_run_allows() -> None:
    write, model = writer(60.0)
    write()
    assert model.calls == FIRST_TOKENS
    write._token_s = 0.02
    write()
    assert model.calls == FIRST_TOKENS + 30  # a hundredth of 60 s
    write._token_s = 0.6 / (MIN_SAMPLE_TOKENS - 1)
    assert write() == "" and model.calls == FIRST_TOKENS + 30


def test_a_sample_that_is_left_out_is_not_shown_and_the_last_one_always_is(tmp_path: Path) -> None:
    write, _ = writer(60.0)
    write._token_s, said = 10.0, list[str]()
    samples = _FinalToo(write, folder=tmp_path / "samples", say=said.append)
    samples.show("25% of the run")
    assert said == []
    samples.close()
    assert said == [f"sample at the end:\n    {'x' * (MIN_SAMPLE_TOKENS + len(PROMPT))}"]


def test_a_run_that_may_take_as_long_as_it_takes_writes_whole_samples() -> None:
    write, model = writer(None)
    cast("Any", write)()
    assert model.calls == SAMPLE_TOKENS
