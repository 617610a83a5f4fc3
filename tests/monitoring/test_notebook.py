"""In a notebook: one cell that changes while a run goes on, and no line for each step. A real kernel runs it."""

from __future__ import annotations

import ast
import math
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from trainwright.monitoring.progress import MAX_POINTS, MIN_STEPS_LIVE, curve
from trainwright.runs.reader import read
from trainwright.runs.records import Step

pytestmark = pytest.mark.examined

FIT = """
import warnings; warnings.simplefilter("error")
import torch, trainwright as tw
from torch import nn
from trainwright.monitoring import progress
progress.LIVE_EVERY_S = 0.0
lines, update = [], progress.NotebookCell.update
def noting(cell, line, step, loss):
    lines.append(line)
    update(cell, line, step, loss)
progress.NotebookCell.update = noting
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] > 0).long()
model = nn.Linear(4, 2)
planted = nn.Sequential(model, nn.Softmax(1))
every = {"log.every": "1steps"}
result = tw.fit(planted, (x, y), nn.CrossEntropyLoss(), steps=40, batch=16, lr=0.3, settings=every)
"""
WATCH = """
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with tw.watch(model, optimizer, out=None) as watch:
    for _ in range(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x).softmax(1), y).backward()
        optimizer.step()
[each.code for each in watch.findings()]
"""


NOTEBOOK = Path(__file__).parents[2] / "docs" / "start" / "first_diagnosis.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The folder and the code cells of the notebook of the docs and of the cells above, run in one kernel."""
    pytest.importorskip("ipykernel")
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(NOTEBOOK, 4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.outputs for cell in code] == [[]] * len(code), "outputs are not kept in the repository"
    code += [nbformat.v4.new_code_cell(source) for source in (FIT, WATCH, "result", "lines")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        patch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        notebook = nbformat.v4.new_notebook(cells=code)
        nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    return folder, [[*cell.outputs] for cell in notebook.cells]


@pytest.mark.slow
@pytest.mark.process
def test_a_run_and_a_watched_loop_in_a_notebook(executed: tuple[Path, list[Any]]) -> None:
    folder, cells = executed
    fit, watch, result, lines = cells[-4:]
    [shown] = [text for text in map(html_of, fit) if "<svg" in text]
    assert "1 critical" in shown, "the softmax before the loss"
    assert "<polyline" in shown and "step 40" in shown and "loss from step 1 to 40" in shown
    assert sum("samples/s" in html_of(each) for each in fit) == 1, "a line for each step"
    assert "loss.softmax_before_cross_entropy" in watch[-1]["data"]["text/plain"]
    assert any("softmax" in html_of(each) for each in watch[:-1]), "the diagnosis is printed"
    assert "step 40" in result[-1]["data"]["text/plain"]
    [log] = [recipe.with_name("log.jsonl") for recipe in folder.glob("runs/*/recipe.yaml")]
    require_what_the_log_has(ast.literal_eval(lines[-1]["data"]["text/plain"]), log)


@pytest.mark.slow
@pytest.mark.process
def test_the_notebook_of_the_first_diagnosis(executed: tuple[Path, list[Any]]) -> None:
    found, fixed, page = map(str, executed[1][-7:-4])
    assert "['loss.softmax_before_cross_entropy']" in found
    assert "softmax_before_cross_entropy" not in fixed
    assert "softmax" in page


def require_what_the_log_has(lines: list[str], log: Path) -> None:
    """Within 2 % of the mean of the newest 16 steps: a line was shown after each step."""
    losses = [each.loss for each in read(log).records if isinstance(each, Step)]
    shown = [float(line.partition("loss ")[2].split()[0]) for line in lines]
    assert len(shown) == len(losses) == 40
    for step, loss in enumerate(shown, 1):
        assert loss == pytest.approx(statistics.fmean(losses[max(0, step - MIN_STEPS_LIVE) : step]), rel=0.02)


def html_of(output: Any) -> str:
    return str(output.get("data", {}).get("text/html", ""))


def test_a_curve_has_gaps_where_values_are_not_finite() -> None:
    assert curve([(1, 2.0)]) == ""
    assert curve([(1, 2.0), (2, 1.0), (3, math.nan), (4, 0.5), (5, 0.7)]).count("<polyline") == 2
    assert len(curve([(n, 1.0) for n in range(MAX_POINTS)])) < 8000
