"""``diagnose --deep``: what found no time in a run is examined afterwards, from its folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trainwright as tw
from trainwright.commands.deep import examine_later
from trainwright.errors import UsageError
from trainwright.report.diagnosis import diagnosis_of
from trainwright.runs.folder import RunFolder
from trainwright.runs.reader import read
from trainwright.runs.records import Examined, Unexamined
from trainwright.training.run import train
from trainwright.watching import budget

pytestmark = pytest.mark.examined

MODEL = """
import torch
from torch import nn

def make():
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
"""
RECIPE = """
name: small
until: 24steps
model: {use: "small:model"}
data: {train: {use: "small:data"}}
loss: cross_entropy
optimizer: {use: sgd, lr: 0.1}
batch: {size: 8}
checkpoint: {every: 10steps}
"""


@pytest.fixture(autouse=True)
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that replays a step finds time."""
    monkeypatch.delenv("TRAINWRIGHT_EXAMINE")
    monkeypatch.setattr(budget, "FREE_S", 0.0)
    monkeypatch.setattr(budget, "EVIDENCE_S", 0.0)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    scope: dict[str, object] = {}
    exec(MODEL, scope)
    torch.manual_seed(0)
    model, optimizer = scope["make"]()  # type: ignore[operator]
    return model, optimizer


def watched(folder: Path, *, softmax: bool = False) -> RunFolder:
    model, optimizer = make()
    x, y = torch.randn(16, 6), torch.arange(16) % 3
    with tw.watch(model, optimizer, out=folder / "run", quiet=True) as watch:
        for _ in range(6):
            optimizer.zero_grad()
            logits = model(x.clone())
            F.cross_entropy(logits.softmax(1) if softmax else logits, y).backward()
            optimizer.step()
    assert watch.folder is not None
    return watch.folder


def left(run: RunFolder) -> Unexamined:
    return [each for each in read(run.log).records if isinstance(each, Unexamined)][-1]


def examined(run: RunFolder) -> set[str]:
    return {
        each.experiment for each in read(run.log).records if isinstance(each, Examined) and "blind" not in each.values
    }


FUNCTION = """
import torch
from torch import nn

def objects():
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    data = torch.linspace(-1, 1, 96).reshape(16, 6), torch.arange(16) % 3
    return model, data, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.mark.slow
def test_a_run_of_a_function_is_trained_to_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project_of_deep.py").write_text(FUNCTION)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    result = tw.fit("project_of_deep:objects", until="12steps", batch=8, quiet=True, seed=0)
    run = RunFolder.open(result.run)
    assert any(f"later: trainwright diagnose {run.path} --deep" in line for line in diagnosis_of(run).lines())
    assert "update" not in examined(run)
    examine_later(run, model=None, say=lambda line: None)
    assert {"update", "structure"} <= examined(run) and left(run).experiments == ()


@pytest.mark.slow
def test_only_objects_that_no_function_makes_need_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "project_of_deep.py").write_text(FUNCTION)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    tw.fit("project_of_deep:objects", until="2steps", batch=8)
    assert "trainwright resume runs/run --set until=4steps" in capsys.readouterr().out
    model, optimizer = make()
    data = torch.randn(16, 6), torch.arange(16) % 3
    run = RunFolder.open(tw.fit(model, data, nn.CrossEntropyLoss(), optimizer=optimizer, until="4steps", batch=8).run)
    assert f"tw.fit(..., resume='{run.path}')" in capsys.readouterr().out
    expected = "--deep --model FILE.py:FUNCTION" if left(run).bundle else 'settings={"log.examine": "all"}'
    assert any(expected in line for line in diagnosis_of(run).lines())


@pytest.mark.slow
def test_a_watched_loop_is_examined_from_its_last_steps(tmp_path: Path) -> None:
    run = watched(tmp_path, softmax=True)
    before, said = left(run), [*diagnosis_of(run).lines()]
    assert {"update", "structure"} <= set(before.experiments) - examined(run)
    assert any("no time for" in line and f"trainwright diagnose {run.path} --deep" in line for line in said)
    assert "--deep" in (run.path / "report.html").read_text()
    (tmp_path / "mine.py").write_text(MODEL)
    examine_later(run, model=f"{tmp_path}/mine.py:make", say=lambda line: None)
    assert {"update", "structure"} <= examined(run) and left(run).experiments == ()
    report = diagnosis_of(run)
    assert not any("no time for" in line for line in report.lines())
    assert "--deep" not in (run.path / "report.html").read_text()
    (found,) = [each for each in report.findings if each.code == "loss.softmax_before_cross_entropy"]
    assert found.tried, "its remedy found no time, either"


def test_a_model_that_only_the_user_can_build_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only your code can build") as raised:
        examine_later(watched(tmp_path), model=None, say=lambda line: None)
    assert "--model" in raised.value.remedy


def test_a_run_that_did_not_keep_its_last_steps_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.watching.incidents.MAX_BUNDLE_BYTES", 10)
    run = watched(tmp_path)
    assert left(run).bundle is None and left(run).experiments
    with pytest.raises(UsageError, match="does not hold its last steps"):
        examine_later(run, model="mine.py:make", say=lambda line: None)


@pytest.mark.slow
def test_a_run_of_live_objects_keeps_its_last_steps_too(tmp_path: Path) -> None:
    model, optimizer = make()
    data = (torch.randn(32, 6), torch.arange(32) % 3)
    settings = {"folder": str(tmp_path), "log.sinks": []}
    done = tw.fit(
        model, data, nn.CrossEntropyLoss(), optimizer=optimizer, steps=12, batch=8, settings=settings, quiet=True
    )
    run = RunFolder.open(done.run)
    (tmp_path / "mine.py").write_text(MODEL)
    assert "structure" in left(run).experiments
    examine_later(run, model=f"{tmp_path}/mine.py:make", say=lambda line: None)
    assert "structure" in examined(run) and left(run).experiments == ()


@pytest.mark.slow
def test_a_run_of_a_recipe_is_trained_to_a_step_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainwright.recipe import load

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "small.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def model():\n    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))\n"
        "def data():\n    return torch.utils.data.TensorDataset(torch.randn(64, 6), torch.arange(64) % 3)\n"
    )
    (tmp_path / "small.yaml").write_text(RECIPE)
    run = RunFolder.open(train(load(tmp_path / "small.yaml"), quiet=True).run)
    assert "structure" in left(run).experiments and left(run).bundle is None, "any of its steps can be trained again"
    steps, before = list[str](), (run.path / "checkpoints").stat().st_mtime_ns
    examine_later(run, model=None, say=steps.append)
    assert steps == ["training from step 20 to 24, in a separate folder"]
    assert "structure" in examined(run) and left(run).experiments == ()
    assert (run.path / "checkpoints").stat().st_mtime_ns == before
