"""The public names, the verbs, and that looking at them does not load torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainwright as tw

NAMES = """
Cursor Ema Loading Loss LossScaler MicroBatch Observer Outcome Precision Probe Recipe Result StepBatch
StepBatches StepResult Stop TrainState TrainwrightError __version__ evaluate fit for_seconds for_steps load
load_checkpoint lr_range make_clip make_optimizer make_schedule make_step save_checkpoint steps train watch
"""
VERBS = (
    "batch-size check demo diagnose env explain export graph lr-range plan replay resume schema train verify version"
)
VERIFY = "checkpoint resume"


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_public_names() -> None:
    assert sorted(tw.__all__) == sorted(NAMES.split())
    for name in tw.__all__:
        assert getattr(tw, name) is not None, name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="fitt"):
        _ = tw.fitt


def test_verbs() -> None:
    from typer.main import get_command

    from trainwright.cli import app

    command = get_command(app)
    assert sorted(command.commands) == VERBS.split()  # type: ignore[attr-defined]
    assert sorted(command.commands["verify"].commands) == VERIFY.split()  # type: ignore[attr-defined]
    commands = {**command.commands, **command.commands["verify"].commands}  # type: ignore[attr-defined]
    for name, verb in commands.items():
        if hasattr(verb, "commands"):
            continue
        assert "--json" in {option for parameter in verb.params for option in parameter.opts}, name


@pytest.mark.process
@pytest.mark.parametrize(
    "code",
    [
        "import trainwright",
        "import trainwright.cli",
        "import trainwright.recipe",
        "import trainwright.plan.make, trainwright.plan.explain, trainwright.plan.machine",
        "import trainwright.runlog.reader, trainwright.runlog.folder, trainwright.runlog.provenance",
        "import trainwright.report.text, trainwright.report.chart, trainwright.report.environment",
    ],
)
def test_torch_stays_unloaded(code: str) -> None:
    assert python(f"{code}\nimport sys\nprint('torch' in sys.modules)") == "False"


@pytest.mark.process
def test_help_leaves_torch_unloaded() -> None:
    code = """
import sys
from pathlib import Path
sys.argv = ["trainwright", "--help"]
from trainwright.cli import app
try:
    app()
except SystemExit:
    pass
print("torch" in sys.modules, "pydantic" in sys.modules)
"""
    assert python(code).splitlines()[-1] == "False False"


@pytest.mark.process
def test_the_first_example_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    readme = (Path(tw.__file__).parent.parent / "README.md").read_text()
    code = readme.split("```python\n")[1].split("```")[0]
    names: dict[str, object] = {}
    exec(code, names)
    result = names["result"]
    assert isinstance(result, tw.Result) and result.ending == "finished" and result.run.is_dir()


def test_the_loop_of_the_readme_runs_and_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    readme = (Path(tw.__file__).parent.parent / "README.md").read_text()
    code = readme.split("```python\n")[2].split("```")[0]
    torch.manual_seed(0)
    dataset = torch.utils.data.TensorDataset(torch.randn(100, 3), torch.randn(100, 1))
    names: dict[str, Any] = {"tw": tw, "dataset": dataset, "my_loss": nn.MSELoss(), "model": nn.Linear(3, 1)}
    exec(code, names)
    state = names["state"]
    weights = {name: weight.clone() for name, weight in state.model.state_dict().items()}
    tw.load_checkpoint(state, "checkpoints/step-00000300")
    batches = tw.StepBatches(dataset, tw.Loading(batch_size=32, micro_size=8), cursor=state.data)
    assert sum(1 for _ in tw.steps(state, batches, names["advance"], until=tw.for_steps(1000))) == 700
    assert all(torch.equal(weight, weights[name]) for name, weight in state.model.state_dict().items())


def test_every_verb_is_in_the_readme() -> None:
    readme = (Path(tw.__file__).parent.parent / "README.md").read_text()
    for verb in VERBS.split():
        assert f"`{verb}" in readme, verb
