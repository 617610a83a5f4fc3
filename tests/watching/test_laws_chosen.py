"""``tw.watch(laws=...)``: by name, cheaply, and laws of the user's own; and the list of what became of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

import trainwright as tw
from tests.rows import each_row
from trainwright.cli import app
from trainwright.doctor.diagnose import LAWS, choose_laws
from trainwright.errors import UsageError
from trainwright.runlog.records import Examined
from trainwright.watching.watch import Watch


def trained(laws: object, out: Path | None = None, steps: int = 4) -> Watch:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tw.watch(model, optimizer, laws=laws, out=out, quiet=True) as watch:  # type: ignore[arg-type]
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(8, 4)), torch.randint(3, (8,))).backward()
            optimizer.step()
    return watch


def outputs_are_probabilities(step: tw.ReplaySession) -> str | None:
    """The outputs of the model are positive."""
    [output] = step.run(upto="forward").outputs
    assert isinstance(output, torch.Tensor)
    return f"the smallest output is {output.min():.3g}" if output.min() < 0 else None


def gradients_are_finite(step: tw.ReplaySession) -> str | None:
    return None if all(torch.isfinite(g).all() for g in step.run().grads.values() if g is not None) else "one is not"


def always_fails(step: tw.ReplaySession) -> str | None:
    raise RuntimeError("not of this model")


def test_a_law_of_ones_own_is_judged_in_ten_lines(tmp_path: Path) -> None:
    watch = trained(["all", outputs_are_probabilities, gradients_are_finite, always_fails], tmp_path / "run")
    [found] = [each for each in watch.findings() if each.code.startswith("law.own.")]
    assert (found.code, found.since_step) == ("law.own.outputs_are_probabilities", 1)
    assert found.symptom.startswith("the smallest output is -")
    assert found.cause == "it should be so: The outputs of the model are positive."
    said = CliRunner().invoke(app, ["laws", str(tmp_path / "run"), "--json"])
    states = {name: law["state"] for name, law in json.loads(said.stdout)["laws"].items() if name.startswith("own.")}
    assert states == {
        "own.always_fails": "not applicable",
        "own.gradients_are_finite": "held",
        "own.outputs_are_probabilities": "broken",
    }
    assert "own.outputs_are_probabilities" in CliRunner().invoke(app, ["laws", str(tmp_path / "run")]).stdout


def test_cheap_laws_run_no_step_again() -> None:
    replayed = {each.experiment for each in trained("all").records if isinstance(each, Examined)}
    cheap = {each.experiment for each in trained("cheap").records if isinstance(each, Examined)}
    assert "again" in replayed - cheap
    assert cheap < replayed


@each_row(
    ("names", "chosen"),
    [
        (["all"], {law.name for law in LAWS}),
        (["ranks"], {law.name for law in LAWS if law.name.startswith("ranks.")}),
        (["ranks.gradients_agree", "ranks.ranks_keep_pace"], {"ranks.gradients_agree", "ranks.ranks_keep_pace"}),
        (["cheap"], {law.name for law in LAWS if law.effort == "cheap"}),
        ([], set()),
    ],
)
def test_laws_are_chosen_by_name(names: list[str], chosen: set[str]) -> None:
    assert {law.name for law in choose_laws(names)} == chosen


@each_row(
    ("laws", "said"),
    [
        ("rank", "there is no law 'rank'"),
        (["ranks.gradient_agree"], "there is no law 'ranks.gradient_agree'"),
        ([3], "neither names nor functions"),
    ],
)
def test_what_is_no_law_is_refused_with_the_nearest(laws: object, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        trained(laws)
    assert caught.value.remedy


def test_the_list_says_what_each_law_states() -> None:
    lines = CliRunner().invoke(app, ["laws"]).stdout.splitlines()
    assert [line.split()[0] for line in lines] == [law.name for law in LAWS]
    assert all(line.endswith(".") for line in lines)
