"""The public names, the verbs, and that looking at them does not load torch."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import trainwright as tw
from tests.house import Function, modules, tree

NAMES = """
ChainedOptimizer Cursor
EarlyStopping Ema Histogram Image Loading Loss LossScaler MicroBatch Observer Outcome Precision Probe Recipe
ReplaySession
Result StepBatch StepBatches StepResult Stop TrainState TrainwrightError __version__ bad_cases check
compare_optimizers evaluate files fit for_seconds for_steps init ladder load load_checkpoint log lr_range
make_clip make_optimizer make_own_step make_schedule make_step mix mup_check pad plan predict profile replay
save_checkpoint steps sweep table train verify_plain verify_resume watch
"""
VERBS = """
agent check checks compare compare-optimizers demo diagnose env errors evaluate evidence
explain export graph init ladder launch lr-range mcp mup-check plan predict profile replay report resume runs schema
serve sweep train verify version
"""
VERIFY = "checkpoint packing parallel plain resume"
LAUNCH = "kubernetes ray skypilot slurm"


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.slow
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
    assert sorted(command.commands["launch"].commands) == LAUNCH.split()  # type: ignore[attr-defined]
    commands = dict(command.commands)  # type: ignore[attr-defined]
    commands |= command.commands["verify"].commands | command.commands["launch"].commands  # type: ignore[attr-defined]
    for name, verb in commands.items():
        if hasattr(verb, "commands"):
            continue
        assert "--json" in {option for parameter in verb.params for option in parameter.opts}, name


WITHOUT_TORCH = """
trainwright trainwright.cli trainwright.recipe trainwright.plan.make trainwright.plan.explain trainwright.plan.machine
trainwright.runs.reader trainwright.runs.folder trainwright.runs.provenance
trainwright.report.chart trainwright.report.environment
"""


@pytest.mark.process
def test_torch_stays_unloaded() -> None:
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    code += "    assert 'torch' not in sys.modules, name"
    done = subprocess.run(
        [sys.executable, "-c", code, *WITHOUT_TORCH.split()], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


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


ROOT = Path(tw.__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = {page.relative_to(ROOT / "docs").as_posix(): page.read_text() for page in (ROOT / "docs").rglob("*.md")}


def blocks(language: str, page: str = README) -> list[str]:
    return [part.split("```")[0] for part in page.split(f"```{language}\n")[1:]]


def test_each_block_of_code_in_the_readme_has_a_test_here() -> None:
    assert (len(blocks("python")), len(blocks("yaml"))) == (2, 1)


@pytest.mark.process
def test_the_first_example_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = blocks("python")[0]
    names: dict[str, object] = {}
    exec(code, names)
    result = names["result"]
    assert isinstance(result, tw.Result) and result.ending == "finished" and result.run.is_dir()


@pytest.mark.slow
def test_the_loop_of_the_docs_runs_and_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = blocks("python", PAGES["how-to/own-the-loop.md"])[0]
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


@pytest.mark.slow
def test_the_watched_loop_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(3, 2), nn.Softmax(1))
    data = torch.utils.data.TensorDataset(torch.randn(64, 3), torch.randint(2, (64,)))
    names: dict[str, Any] = {
        "F": nn.functional,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": torch.utils.data.DataLoader(data, batch_size=8),
        "scaler": None,
    }
    exec(blocks("python")[1], names)
    assert names["watch"].step == 8 and "loss.softmax_before_cross_entropy" in capsys.readouterr().out
    assert (tmp_path / "runs" / "watch" / "log.jsonl").exists()


PARTS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed, self.out = nn.Embedding(16, width), nn.Linear(width, 4)

    def forward(self, ids):
        return self.out(self.embed(ids))

def train_set():
    return TensorDataset(torch.arange(1024) % 16, torch.arange(1024) % 4)

val_set = train_set
"""


@pytest.mark.slow
def test_the_recipe_of_the_readme_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mypackage").mkdir()
    for name in ("__init__", "nets", "data"):
        (tmp_path / "mypackage" / f"{name}.py").write_text(PARTS)
    (tmp_path / "recipe.yaml").write_text(blocks("yaml")[0])
    settings = ["optimizer.lr=1e-3", "until=3steps", "data.workers=0"]  # no processes here
    result = tw.train(tw.load("recipe.yaml", overrides=settings))
    assert (result.ending, result.step) == ("finished", 3)


def test_the_files_that_commands_in_the_readme_and_the_docs_name_exist() -> None:
    """Links are tested in tests/test_links.py."""
    named = set()
    for page in (README, *PAGES.values()):
        named |= {ROOT / name for name in re.findall(r"scripts/test (tests/[\w/.]+)", page)}
        named |= {ROOT / "benchmarks" / f"{name}.py" for name in re.findall(r"-m benchmarks\.(\w+)", page)}
        named |= {ROOT / name for name in re.findall(r"trainwright (?:plan|verify resume) (recipes/[\w.-]+)", page)}
    assert len(named) > 40
    assert sorted(str(each) for each in named if not each.exists()) == []


class SiteLoader(yaml.SafeLoader):
    """Reads mkdocs.yml without mkdocs: a tag that names a Python function is read as None."""


SiteLoader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def navigation(entry: Any) -> Iterator[tuple[str, str]]:
    """Title ("" if the page has its own) and path of each page in the ``nav`` of mkdocs.yml."""
    if isinstance(entry, str):
        yield "", entry
    elif isinstance(entry, list):
        for each in entry:
            yield from navigation(each)
    else:
        [(title, inside)] = entry.items()
        yield from [(title, inside)] if isinstance(inside, str) else navigation(inside)


NAVIGATION = list(navigation(yaml.load((ROOT / "mkdocs.yml").read_text(), SiteLoader)["nav"]))


def test_every_page_of_the_docs_is_in_the_navigation_of_the_site() -> None:
    assert sorted(page for _, page in NAVIGATION) == sorted(PAGES)


def test_a_page_has_the_title_of_its_entry_in_the_navigation() -> None:
    headings = {page: text.partition("\n")[0] for page, text in PAGES.items()}
    assert {page: f"# {title}" for title, page in NAVIGATION if title} == {
        page: headings[page] for title, page in NAVIGATION if title
    }


def test_the_readme_leads_to_the_documentation() -> None:
    assert "/blob/main/docs/index.md)" in README


def test_the_readme_names_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [name for name in extras if name not in ("dev", "docs") and f"`{name}`" not in README] == []


def test_every_verb_is_among_the_commands() -> None:
    for verb in VERBS.split():
        assert f"`{verb}" in PAGES["reference/commands.md"], verb


def public_functions() -> Iterator[Function]:
    """The functions of ``trainwright.__all__``, and the constructors of its classes."""
    for name in set(tw.__all__) - {"__version__"}:
        home = inspect.getmodule(getattr(importlib.import_module(tw._HOME[name]), name))
        path = modules().get(home.__name__) if home else None
        for node in tree(path).body if path else ():
            if isinstance(node, Function) and node.name == name:
                yield node
            if isinstance(node, ast.ClassDef) and node.name == name:
                yield from (each for each in node.body if isinstance(each, Function) and each.name == "__init__")


def test_no_public_function_takes_whatever_comes() -> None:
    public = list(public_functions())
    assert len(public) > 10
    taken = [(each.name, one) for each in public for one in (each.args.vararg, each.args.kwarg) if one]
    assert [name for name, one in taken if not typed(one)] == []


def typed(options: ast.arg) -> bool:
    """Return True if the type lists the keywords, says that they are figures that the user names, or refuses all."""
    return options.annotation is not None and ast.unparse(options.annotation) in (
        "Unpack[FitOptions]",
        "Unpack[RunOptions]",
        "float | Tensor | Loggable",
        "Never",
    )


def test_packages_that_are_called_as_functions() -> None:
    """``trainwright.plan`` and ``trainwright.replay`` are packages, and public names."""
    from trainwright.plan import make

    assert callable(make.make_plan) and callable(tw.plan) and callable(tw.replay)
    with pytest.raises(TypeError, match="run"):
        tw.replay()  # type: ignore[call-arg]
