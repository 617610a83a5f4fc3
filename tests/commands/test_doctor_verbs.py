"""``demo --break``, ``diagnose`` and ``explain``: what a person at 2 a.m. types."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_type_hints

import pytest
from typer.testing import CliRunner

from tests import forked
from trainwright.cli import app, running
from trainwright.commands.demo_faults import FAULTS, show
from trainwright.runs.folder import RunFolder
from trainwright.runs.reader import read
from trainwright.runs.records import Watched

pytestmark = [pytest.mark.examined, pytest.mark.process]


def trainwright(*arguments: str) -> forked.Forked:
    return forked.run(forked.COMMAND_LINE, *arguments)


NAMED = {
    "lr": "optim.lr_too_high",
    "nan": "data.nonfinite_input",
    "fp16": "precision.fp16_overflow",
    "labels": "data.label_out_of_range",
    "zero-grad": "optim.missing_zero_grad",
    "sign": "loss.wrong_sign",
    "softmax": "loss.softmax_before_cross_entropy",
    "params": "optim.params_missing",
    "step": "optim.step_never_called",
}


@pytest.fixture(autouse=True)
def within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo shows what the doctor finds as it is."""
    monkeypatch.delenv("TRAINWRIGHT_EXAMINE")


@pytest.mark.slow
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_planted_fault_is_named_first(fault: str) -> None:
    done = trainwright("demo", "--break", fault, "--json")
    report = json.loads(done.stdout)
    codes = [found["code"] for found in report["findings"]]
    if fault == "none":
        assert done.returncode == 0 and not [f for f in report["findings"] if f["severity"] != "info"], codes
        return
    assert codes[0] == NAMED[fault], codes
    assert len(report["experiments"]) == len(set(report["experiments"]))
    where = report["findings"][0]["where"]
    source = where["source"]
    if fault == "nan":
        assert where["sample_ids"] == [137]
    assert source.startswith("demo_faults.py:"), "where the loop is, not what calls the verb"
    again = CliRunner().invoke(app, ["diagnose", report["run"], "--json"])
    assert again.exit_code == done.returncode
    assert json.loads(again.stdout)["findings"][0]["code"] == NAMED[fault]


@pytest.mark.parametrize(
    ("budget", "least", "most", "length"),
    [("7steps", 7, 7, "7 steps"), ("0.5ep", 10, 10, "10 steps"), ("0.5s", 1, 10**6, "0.5 s")],
)
def test_the_budget_of_the_demo_holds_for_a_planted_fault_too(budget: str, least: int, most: int, length: str) -> None:
    said: list[str] = []
    report = show("none", said.append, budget=budget)
    taken = [each.step for each in read(RunFolder.open(report.run).log).records if isinstance(each, Watched)]
    assert least <= max(taken) <= most
    assert f"; {length} of" in said[0]


def test_the_help_lists_every_fault() -> None:
    (option,) = get_type_hints(running.demo, include_extras=True)["broken"].__metadata__
    listed = option.help.partition(": ")[2]
    assert set(re.findall(r"[\w-]+", listed)) - {"or"} == set(FAULTS)


def test_an_unknown_fault_ends_in_a_sentence() -> None:
    done = trainwright("demo", "--break", "lrr")
    assert done.returncode == 2 and "lr" in done.stderr and "Traceback" not in done.stderr


def test_explain_prints_a_page_and_suggests() -> None:
    assert "**Fix.**" in trainwright("explain", "optim.missing_zero_grad").stdout
    done = trainwright("explain", "opt.missing_zerograd")
    assert done.returncode == 2 and "optim.missing_zero_grad" in done.stderr


def test_diagnose_of_no_run_ends_in_a_sentence(tmp_path: Path) -> None:
    done = trainwright("diagnose", str(tmp_path / "nothing"))
    assert done.returncode == 2 and "Traceback" not in done.stderr
