"""A step of a run again, in another process and aside from its folder: the same bits, or what is different."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests import forked
from tests.commands.replayed_runs import PARTS, train, work_in
from trainwright.cli import app
from trainwright.commands.replay import rerun
from trainwright.errors import UsageError
from trainwright.runs.deaths import deaths_in, write_bundle
from trainwright.runs.folder import RunFolder
from trainwright.runs.reader import read
from trainwright.runs.records import Examined, Skipped, Step, Watched

pytestmark = [pytest.mark.examined, pytest.mark.slow]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work_in(tmp_path, monkeypatch)
    return tmp_path


def contents(run: RunFolder) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


ANOTHER = """\
import json, sys
from trainwright.commands.replay import rerun
print(json.dumps([rerun(run, 14).to_json() for run in sys.argv[1:]]))
"""
KINDS = [("norm", "fp32"), ("norm", "fp16"), ("lstm", "fp32"), ("lstm", "bf16"), ("again", "bf16"), ("again", "fp16")]
Trained = dict[tuple[str, str], tuple[RunFolder, dict[str, bytes], dict[str, Any]]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One run per kind and precision, the content of its folder, and the replay of its last step in another process."""
    root = tmp_path_factory.mktemp("trained")
    runs = {}
    with pytest.MonkeyPatch.context() as patch:
        work_in(root, patch)
        for kind, precision in KINDS:
            run = train(f"name={kind}-{precision}", f"model.args.kind={kind}", f"precision={precision}")
            runs[kind, precision] = RunFolder.open(run.path.absolute())
        before = {each: contents(run) for each, run in runs.items()}
        done = forked.run(ANOTHER, *(str(run.path) for run in runs.values()))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    return {each: (run, before[each], result) for (each, run), result in zip(runs.items(), told, strict=True)}


@pytest.mark.process
@pytest.mark.parametrize(("kind", "precision"), KINDS)
def test_a_step_of_a_run_is_the_same_bits(folder: Path, trained: Trained, kind: str, precision: str) -> None:
    run, before, elsewhere = trained[kind, precision]
    for step in (3, 11):
        done = rerun(run.path, step)
        assert done.same_bits and done.exit_code == 0, done.lines()
        assert {each.what for each in done.compared} >= {"loss", "gradient norm", "learning rate", "sample ids"}
        assert not [each for each in done.findings if each.severity == "critical"], done.lines()
        assert any(getattr(each, "experiment", "") == "again" for each in done.records)
    assert elsewhere["same_bits"] is True, elsewhere["outcome"]
    assert contents(run) == before, "the run folder was touched"


@pytest.mark.slow
def test_a_step_that_the_log_leaves_out(folder: Path) -> None:
    run = train("log.every=4steps")
    done = rerun(run.path, 8)
    assert done.same_bits and "loss" in {each.what for each in done.compared}, done.lines()
    done = rerun(run.path, 13)
    assert done.same_bits and "no record of step 13" in " ".join(done.notes), done.lines()
    assert "loss" in {each.what for each in rerun(run.path, 14).compared}, "the last step is logged however it falls"


@pytest.mark.slow
def test_a_run_that_is_counted_in_seconds(folder: Path) -> None:
    """The learning rate of each step follows from the clock, and is in the log as it was."""
    run = train("until=0.3s", "schedule.use=cosine", "checkpoint.every=0.2run", "log.every=20steps", "log.doctor=true")
    steps = [each for each in read(run.log).records if isinstance(each, Step)]
    last = steps[-1].step
    assert sum(len(each.fractions) for each in steps) == last
    for step in (2, last // 2, last):
        done = rerun(run.path, step)
        assert done.same_bits and not done.inexact, done.lines()
    with pytest.raises(UsageError, match=f"has {last} steps"):
        rerun(run.path, last + 1)
    lines = run.log.read_text().splitlines(keepends=True)
    run.log.write_text("".join(line for line in lines if '"kind":"step"' not in line or '"step":1,' in line))
    done = rerun(run.path, last)
    assert done.inexact and any("follows the clock" in note for note in done.notes), "as after a kill"


def test_a_step_count_needs_no_clock(trained: Trained) -> None:
    run, *_ = trained["norm", "fp32"]
    assert not any(each.fractions for each in read(run.log).records if isinstance(each, Step))


@pytest.mark.slow
def test_another_recipe_gives_other_bits_and_no_finding(folder: Path, trained: Trained) -> None:
    run, *_ = trained["norm", "fp32"]
    done = rerun(run.path, 7, settings=["optimizer.lr=0.5"])
    assert done.exit_code == 1 and "with optimizer.lr=0.5" in done.outcome
    assert all(each.code != "resources.not_reproducible" for each in done.findings)


@pytest.mark.slow
def test_a_step_after_a_rollback(folder: Path) -> None:
    """The steps before it are run again too: those after the rollback from the state that it went back to."""
    settings = ["model.args.kind=again", "data.train.use=parts:Wild", "data.shuffle=false", "optimizer.clip.by=none"]
    run = train(*settings, "until=44steps", "checkpoint.every=50steps", "spikes.policy=rollback", "log.doctor=true")
    log = read(run.log).records
    last = max(each.step for each in log if isinstance(each, Skipped))
    done = rerun(run.path, last + 4)
    then = {each.step: each.grad_norm for each in log if isinstance(each, Watched)}
    now = {each.step: each.grad_norm for each in done.records if isinstance(each, Watched)}
    assert done.same_bits and now.keys() >= set(range(last - 3, last + 5)), done.lines()
    assert {step: then[step] for step in now} == now


@pytest.mark.slow
def test_a_changed_dataset_is_told(folder: Path) -> None:
    run = train()
    text = PARTS.replace("torch.linspace(0, index, 12) / 96", "torch.linspace(0, index, 12) / 95")
    (folder / "parts.py").write_text(text)
    sys.modules.pop("parts", None)
    done = rerun(run.path, 7)
    assert done.exit_code == 1
    assert [each.code for each in done.findings if each.code == "resources.not_reproducible"], done.lines()
    assert done.notes, "the code is another, and that is said"


@pytest.mark.slow
def test_a_step_that_dies_dies_again(folder: Path) -> None:
    settings = ["data.train.use=parts:Dying", "data.shuffle=false", "model.args.kind=strict"]
    words = [word for each in settings for word in ("--set", each)]
    assert CliRunner().invoke(app, ["train", "tiny.yaml", *words]).exit_code == 1
    run = RunFolder.open("runs/tiny")
    done = rerun(run.path, 8)
    assert done.error == "ValueError: what a sample" and done.exit_code == 0, done.lines()
    result = next(each for each in done.records if isinstance(each, Examined) and each.experiment == "unfinished")
    assert result.values["error"] == done.error
    deaths = deaths_in(read(run.log).records, 8, [])
    bundle = write_bundle(run, 8, run.checkpoints / "step-00000005", read(run.log).records, deaths)
    again = rerun(bundle)
    assert again.error == done.error and again.exit_code == 0, again.lines()


@pytest.mark.parametrize(("step", "message"), [(None, "many steps"), (0, "no step 0"), (99, "has 14 steps")])
def test_mistakes_are_told(folder: Path, trained: Trained, step: int | None, message: str) -> None:
    run, *_ = trained["norm", "fp32"]
    with pytest.raises(UsageError, match=message) as caught:
        rerun(run.path, step)
    assert caught.value.remedy
