"""A finding points at the line that made the call, also where the loop does not stand inside of the ``with``."""

from __future__ import annotations

import inspect
import runpy
from pathlib import Path

import torch
import torch.nn.functional as F
import typer
from torch import nn

import trainwright as tw
from trainwright.recorder.callers import calling_frames
from trainwright.runs.reader import read
from trainwright.runs.records import Watched
from trainwright.watching.watch import Watch


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def line_of(text: str) -> str:
    lines, first = inspect.getsourcelines(one_step)
    (offset,) = [number for number, line in enumerate(lines) if text in line]
    return f"{Path(__file__).name}:{first + offset}"


def watched(folder: Path) -> Watch:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with tw.watch(model, optimizer, out=folder, quiet=True) as watch:
        for _ in range(6):
            one_step(model, optimizer)
    return watch


def test_a_finding_points_into_the_function_that_made_the_call(tmp_path: Path) -> None:
    (found,) = watched(tmp_path / "run").findings()
    assert (found.code, found.where.source) == ("optim.missing_zero_grad", line_of(".backward()"))


def test_lines_are_recorded_once_while_they_are_the_same(tmp_path: Path) -> None:
    records = [each for each in read(watched(tmp_path / "run").folder.log).records if isinstance(each, Watched)]
    lines = [each.values["lines"] for each in records if "lines" in each.values]
    loss, step = line_of(".backward()"), line_of("step()")
    assert lines == [[["forward", loss], ["backward", loss], ["step", step], ["op:cross_entropy", loss]]]


SCRIPT = """\
import torch
import torch.nn.functional as F
from torch import nn

import trainwright as tw

torch.manual_seed(0)
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
with tw.watch(model, optimizer, out=None, quiet=True) as watch:
    for _ in range(6):
        optimizer.zero_grad()
        probabilities = model(torch.randn(8, 4)).softmax(1)
        F.cross_entropy(probabilities, torch.randint(3, (8,))).backward()
        optimizer.step()
"""


def source_of(folder: Path, script: str) -> tuple[str, str | None]:
    """What is found in a script, and where."""
    path = folder / "train.py"
    path.write_text(script)
    (found,) = runpy.run_path(str(path))["watch"].findings()
    return found.code, found.where.source


def test_a_loop_at_the_level_of_a_module(tmp_path: Path) -> None:
    assert source_of(tmp_path, SCRIPT) == ("loss.softmax_before_cross_entropy", "train.py:13")


def test_an_op_that_raises(tmp_path: Path) -> None:
    raising = SCRIPT.replace(".softmax(1)", "").replace("randint(3,", "randint(3, 4,")
    raising = f"import contextlib\n{raising}".replace("with tw.watch", "with contextlib.suppress(IndexError), tw.watch")
    assert source_of(tmp_path, raising) == ("data.label_out_of_range", "train.py:15")


def test_the_frames_of_a_command_line_are_not_the_users() -> None:
    command, frames = typer.Typer(), []

    @command.command()
    def train() -> None:
        frames.extend(calling_frames())

    exec(compile("command([], standalone_mode=False)", "/home/me/.local/bin/trainwright", "exec"))
    here = "test_the_frames_of_a_command_line_are_not_the_users"
    assert [each.f_code.co_name for each in frames[:2]] == ["train", here]
