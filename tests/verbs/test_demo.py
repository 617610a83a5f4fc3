"""The demo: its budget is that of the whole command."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from trainwright.verbs.demo import demo


@pytest.mark.slow
def test_the_budget_counts_the_whole_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said, settings = io.StringIO(), ["log.doctor=false", "model.args.width=4"]
    begin_s = time.perf_counter() - 60.0
    result = demo("digits", budget="50s", settings=settings, console=Console(file=said, width=200), begin_s=begin_s)
    assert result.ending == "finished" and result.state is not None
    assert 1.0 <= result.state.elapsed_s < 10.0, "nothing of the 50 s was left: a second of training all the same"
    assert "length      50 s by the clock: the start, training, evaluation" in said.getvalue()
    assert "longer than that" in said.getvalue()
