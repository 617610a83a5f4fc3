"""Each planted bottleneck is named, by the verb that trains a recipe and by the watch of a loop."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import trainwright as tw
from tests.profiling.planted import WAIT_S, Net, Rows, slow_callback
from trainwright.cli import app
from trainwright.commands.profile import ProfiledRun, Trials, num_rounds, profile
from trainwright.errors import UsageError
from trainwright.profiling.verdict import Advice
from trainwright.profiling.words import TriedAdvice
from trainwright.recipe import from_mapping
from trainwright.report.pages.view import RunView
from trainwright.training.prepare import prepare
from trainwright.training.subject import Built, named

pytestmark = pytest.mark.slow
HERE = "tests.profiling.planted"


def recipe(tmp_path: Path) -> dict[str, Any]:
    return {
        "name": "planted",
        "until": "1000steps",
        "model": {"use": f"{HERE}:Net"},
        "data": {"train": {"use": f"{HERE}:Rows"}},
        "loss": "cross_entropy",
        "batch": {"size": 4},
        "precision": "fp32",
        "checkpoint": {"every": None},
        "folder": str(tmp_path),
    }


def profiled(tmp_path: Path, *settings: str) -> ProfiledRun:
    def load(more: Sequence[str]) -> Built:
        return Built(from_mapping(recipe(tmp_path), overrides=[*settings, *more]), None)

    return profile(load, for_s=0.2, budget_s=0.0)


def test_a_dataset_that_sleeps(tmp_path: Path) -> None:
    found = profiled(tmp_path, f"data.train.args.wait_s={WAIT_S}")
    assert found.profile.verdict.bound == "input"
    assert "the training process reads itself" in found.profile.verdict.headline
    assert any("Rows.__getitem__ at planted.py" in each for each in found.profile.verdict.evidence)
    assert found.profile.next.startswith("2 workers")
    steps = [json.loads(line) for line in (found.folder / "log.jsonl").read_text().splitlines()]
    assert steps[-1]["reason"] == "all is measured"
    with gzip.open(found.folder / "traces" / "profile.json.gz") as file:
        assert json.load(file)["traceEvents"]


@pytest.mark.process
def test_one_worker(tmp_path: Path) -> None:
    found = profiled(tmp_path, f"data.train.args.wait_s={WAIT_S}", "data.workers=1")
    assert found.profile.verdict.bound == "input"
    assert "1 worker reads" in found.profile.verdict.headline
    assert found.profile.next.startswith("2 workers")


def trial(tmp_path: Path, advice: Sequence[Advice], *own: str, budget_s: float = 300.0) -> list[TriedAdvice]:
    """Return the result of trials in blocks of a few steps. The speed-up depends on the machine and is not tested."""

    def load(more: Sequence[str]) -> Built:
        return Built(from_mapping(recipe(tmp_path), overrides=[*own, *more]), None)

    return Trials(load, prepare(load(()).loaded), budget_s, lambda line: None, block_s=0.004).of(advice)


@pytest.mark.parametrize(
    ("round_s", "left_s", "later", "rounds"),
    [
        (0.39, 15.0, 0, 9),
        (0.39, -4.0, 0, 6),
        (0.39, 2.0, 0, 6),
        (1.0, 14.0, 1, 7),
        (1.0, 14.0, 5, 6),
        (2.0, 3.0, 0, 0),
    ],
    ids=["ample", "prepared for longer than the budget", "short", "two share it", "many share it", "too slow"],
)
def test_a_trial_that_is_short_beside_the_budget_is_made(
    round_s: float, left_s: float, later: int, rounds: int
) -> None:
    assert num_rounds(round_s, left_s, 20.0, later) == rounds


@pytest.mark.parametrize(
    ("settings", "own"),
    [
        (("optimizer.args.fused=true",), ("optimizer.args.fused=false",)),
        (("channels-last",), (f"model.use={HERE}:Pictures",)),
        (("precision=bf16",), ()),
        (("batch x 2",), ()),
    ],
)
def test_a_trial_comes_to_its_end(tmp_path: Path, settings: tuple[str, ...], own: tuple[str, ...]) -> None:
    [tried] = trial(tmp_path, [Advice("a remedy", "a trial", settings)], *own)
    assert tried.seen is not None and tried.seen.rounds == 9, tried.why_not


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_a_trial_of_compiling_comes_to_its_end(tmp_path: Path) -> None:
    torch._dynamo.reset()  # the warnings are torch's own, while it compiles
    [tried] = trial(tmp_path, [Advice("compile the model", "a trial", ("model.compile=true",))])
    assert tried.seen is not None and tried.seen.rounds == 9, tried.why_not


def test_a_trial_says_why_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    compiles, useless = Advice("compile", "a trial", ("model.compile=true",)), Advice("only you can", "a reason")
    wrong = Advice("a wrong setting", "a trial", ("batch.micro=-1",))
    found = trial(tmp_path, [compiles, useless, wrong])
    assert "needs a C++ compiler" in found[0].why_not
    assert found[1].seen is None and found[1].why_not == ""
    assert "batch.micro" in found[2].why_not
    [late] = trial(tmp_path, [wrong], budget_s=0.0)
    assert "the time for trials is used up" in str(late)


def test_smaller_operators_for_the_same_samples_are_no_gain(tmp_path: Path) -> None:
    """Whatever the machine does meanwhile."""
    [tried] = trial(tmp_path, [Advice("single samples", "a trial", ("batch.micro=1",))], "model.args.tiny=100")
    assert tried.seen is not None and not tried.seen.is_proven
    assert "no gain" in str(tried)


def test_a_slow_callback(tmp_path: Path) -> None:
    found = profiled(tmp_path, f"observers=[{{use: '{HERE}:slow_callback'}}]")
    assert found.profile.verdict.bound == "overhead"
    assert found.profile.next.startswith("run slow_callback less often")


def test_a_checkpoint_after_every_step(tmp_path: Path) -> None:
    found = profiled(tmp_path, "checkpoint.every=1steps", "checkpoint.asynchronous=false")
    assert found.profile.verdict.bound == "overhead"
    assert "saves checkpoints" in found.profile.verdict.headline
    assert "(checkpoint.every)" in found.profile.next
    assert not (found.folder / "checkpoints").exists()


def test_tiny_operators_and_a_host_sync(tmp_path: Path) -> None:
    found = profiled(tmp_path, "model.args={tiny: 200, syncs: true}")
    verdict = found.profile.verdict
    assert verdict.bound == "launch"
    assert "too small" in verdict.headline
    assert "compile the model" in [each.name for each in verdict.advice]
    assert [sync.site.partition(":")[0] for sync in found.profile.facts.syncs] == ["planted.py"]
    assert found.profile.facts.syncs[0].calls == 1
    adds = sum(work.calls for work in found.profile.facts.work if work.op == "add" and work.phase == "forward")
    assert adds == 200
    assert {one.path for one in found.profile.facts.modules} >= {"layers.0", "layers.2"}
    assert max(found.profile.facts.memory) > 0


def test_a_lean_loop(tmp_path: Path) -> None:
    """Large products in half the bytes, of rows that lie in memory."""
    parts = (f"model.use={HERE}:Wide", f"data.train.use={HERE}:in_memory", "optimizer.args.fused=true")
    lean = (*parts, "precision=bf16", "batch.size=512")
    found = profiled(tmp_path, *lean)
    assert found.profile.verdict.bound == "compute", str(found.profile)
    assert found.profile.next == "nothing to gain"


def test_a_run_that_is_too_short(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="over after 5 steps"):
        profiled(tmp_path, "until=5steps")


def test_a_run_whose_model_was_passed_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text(json.dumps({**recipe(tmp_path), "model": {"use": "live:Net"}}))
    with pytest.raises(UsageError, match=r"cannot be built from its folder(.|\n)*tw.fit\('module:function'\)"):
        profile(named(run / "recipe.yaml").build)


def test_the_command_on_a_run_and_its_page(tmp_path: Path) -> None:
    short = {"until": "20steps", "log": {"doctor": False}}
    result = tw.train(from_mapping(recipe(tmp_path) | short), quiet=True)
    said = CliRunner().invoke(app, ["profile", str(result.run), "--seconds", "0.05", "--budget", "0s", "--json"])
    assert said.exit_code == 0, said.output
    seen = json.loads(said.stdout.splitlines()[-1])
    assert seen["verdict"]["headline"] in (Path(seen["run"]) / "report.html").read_text()
    (Path(seen["run"]) / "profile.json").write_text('{"facts": 3}')
    assert "profile.json" in RunView.read(seen["run"]).unreadable


def watched(tmp_path: Path, steps: int, *, is_slow: bool = True, **options: Any) -> tuple[Path, list[float]]:
    torch.manual_seed(0)
    model = Net(syncs=True)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(Rows(), batch_size=4)
    losses, batches = [], iter(loader)
    with tw.watch(
        model, optimizer, loader=loader, out=tmp_path / "watch", examine="listen", quiet=True, **options
    ) as watch:
        for _ in range(steps):
            x, y = next(batches)
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if is_slow:
                slow_callback(None, None)
            losses.append(loss.item())
    assert watch.folder is not None
    return watch.folder.path, losses


def test_a_watched_loop(tmp_path: Path) -> None:
    """Its slow function is named, and the losses are the same bits as without the profile.

    The verdict follows from times, which the load of the machine changes: test_verdict.py covers it.
    """
    folder, losses = watched(tmp_path, 50, profile=5)
    found = json.loads((folder / "profile.json").read_text())
    slow = [each for each in found["facts"]["hot"] if each["label"] == "slow_callback"]
    assert [(each["phase"], each["site"].partition(":")[0]) for each in slow] == [("loop", "planted.py")]
    assert {sync["site"].partition(":")[0] for sync in found["facts"]["syncs"]} >= {"planted.py"}
    assert found["facts"]["failed"] == {}
    assert (folder / "traces" / "profile.json.gz").exists()
    assert watched(tmp_path, 50, is_slow=False)[1] == losses


def test_a_loop_that_ends_while_it_is_profiled(tmp_path: Path) -> None:
    for steps in (3, 12, 18):
        folder, _ = watched(tmp_path, steps, profile=5)
        assert (folder / "profile.json").exists() == (steps > 5)


def test_a_profile_that_cannot_be() -> None:
    model = Net()
    with pytest.raises(UsageError, match="profile is 0"):
        tw.watch(model, torch.optim.SGD(model.parameters(), 0.1), out=None, profile=0)
