"""Terminal, page, list of runs, diagnosis and ``--json`` show the same findings, the same end and the same verdict."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import trainwright as tw
from tests.report_pages.runs import ended, evaluated, found, make_run, started, step
from tests.report_pages.serving import site_of
from tests.watching.loops import X, Y, net, sgd
from trainwright.cli import app
from trainwright.report.diagnosis import diagnosis_of
from trainwright.report.pages.report import write_report
from trainwright.report.pages.view import RunView
from trainwright.report.runs import list_runs
from trainwright.runs.folder import RunFolder
from trainwright.runs.json_values import strict
from trainwright.runs.reader import read
from trainwright.runs.records import Ended, Found, Withdrawn

pytestmark = [pytest.mark.examined, pytest.mark.slow]


def asked(*words: str) -> dict[str, Any]:
    """Return the JSON output of a command."""
    return dict(json.loads(CliRunner().invoke(app, [*words, "--json"]).output))


def of_the_list(folder: Path) -> dict[str, Any]:
    [row] = [each for each in asked("runs", str(folder.parent))["runs"] if each["run"] == str(folder)]
    return dict(row)


def require_one_source(path: Path) -> None:
    """Every view of a run says the same."""
    view, report = RunView.read(path), diagnosis_of(RunFolder(path))
    assert report.findings == tuple(view.findings) and report.added == ()
    assert view.state == report.state == of_the_list(path)["state"]
    assert view.verdict == report.verdict
    diagnosed = asked("diagnose", str(path))
    assert diagnosed["verdict"] == of_the_list(path)["verdict"] == strict(view.verdict)
    assert diagnosed["findings"] == json.loads(json.dumps([strict(each) for each in view.findings]))
    assert list_runs(path.parent).rows
    with site_of(path.parent) as site:
        pages = [site.ask(f"/view?run={path.name}").text, write_report([path]).path.read_text()]
    for page in pages:
        assert str(escaped(view.verdict.sentence)) in page and view.state in page
        assert all(str(escaped(each.symptom)) in page for each in view.findings)


def escaped(text: str) -> object:
    from markupsafe import escape

    return escape(text)


def loop(folder: Path, steps: int, *, until: Callable[[int], bool] = lambda step: False) -> list[Found]:
    """A watched loop that never clears its gradients."""
    torch.manual_seed(0)
    model = net()
    optimizer = sgd(model, lr=1e-3)
    with tw.watch(model, optimizer, out=folder, quiet=True) as watch:
        for number in range(1, steps + 1):
            rows = torch.randperm(32)[:8]
            F.cross_entropy(model(X[rows]), Y[rows]).backward()
            optimizer.step()
            if until(number):
                break
    return watch.findings()


def test_a_finding_whose_words_change(tmp_path: Path) -> None:
    findings = loop(tmp_path / "loop", 60)
    records = [each for each in read(tmp_path / "loop/log.jsonl").records if isinstance(each, Found)]
    [wordings] = [[each for each in records if each.code == code] for code in ["optim.missing_zero_grad"]]
    assert len(wordings) > 1 and wordings[0].evidence != wordings[-1].evidence, "more was measured"
    view = RunView.read(tmp_path / "loop")
    assert [strict(each) for each in view.findings] == [strict(each) for each in findings]
    require_one_source(tmp_path / "loop")


def test_a_finding_that_was_withdrawn(tmp_path: Path) -> None:
    records = [started(), step(1), found("a.b"), found("c.d"), Withdrawn(time_s=1.0, code="a.b", step=9), ended(9)]
    folder = make_run(tmp_path, "run", records, settings={})
    assert [each.code for each in RunView.read(folder.path).findings] == ["c.d"]
    require_one_source(folder.path)


def test_a_run_of_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    planted = nn.Sequential(nn.Linear(4, 2), nn.Softmax(1))
    result = tw.fit(planted, (x, (x[:, 0] > 0).long()), nn.CrossEntropyLoss(), steps=40, batch=16, name="planted")
    said = capsys.readouterr().out
    require_one_source(result.run)
    view = RunView.read(result.run)
    assert result.verdict == view.verdict and f"verdict: {view.verdict}" in said
    assert list(result.findings) == view.findings and view.findings[0].symptom in said
    assert result.to_json()["verdict"] == strict(view.verdict)
    assert view.verdict.word == "critical finding" and "loss.softmax_before_cross_entropy" in view.verdict.sentence


@pytest.mark.process
def test_a_loop_that_was_killed(tmp_path: Path) -> None:
    """Without an end, all readers judge what is in the log, and they judge alike."""

    def is_killed(step: int) -> bool:
        if step == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    child = os.fork()
    if child == 0:
        try:
            loop(tmp_path / "loop", 100, until=is_killed)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert RunView.read(tmp_path / "loop").state == "killed"
    assert not any(isinstance(each, Ended) for each in read(tmp_path / "loop/log.jsonl").records)
    require_one_source(tmp_path / "loop")


def test_a_loop_that_runs_and_one_that_was_interrupted(tmp_path: Path) -> None:
    def look(number: int) -> bool:
        if number == 8:
            assert RunView.read(tmp_path / "loop").state == "running" == of_the_list(tmp_path / "loop")["state"]
            require_one_source(tmp_path / "loop")
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        loop(tmp_path / "loop", 100, until=look)
    view = RunView.read(tmp_path / "loop")
    assert view.state == "stopped" and view.verdict.sentence.startswith("stopped by Ctrl-C at step 8")
    require_one_source(tmp_path / "loop")


@pytest.mark.parametrize("end", [[], [ended(200)]], ids=["killed", "by an older version"])
def test_a_log_without_a_verdict_is_judged_by_its_readers(tmp_path: Path, end: list[Ended]) -> None:
    """Steps that a resume went back over do not count."""
    losses = {number: 0.7 * 0.98**number for number in range(1, 201)}
    seen = [evaluated(20 * n, loss) for n, loss in enumerate((0.6, 0.5, 0.52, 0.6, 0.68, 0.75), 1)]
    records = [started(), *(step(n, losses[n]) for n in range(1, 60)), evaluated(59, 0.1), started(50)]
    records += [step(n, losses[n]) for n in range(51, 201)]
    folder = make_run(tmp_path, "run", [*records, *seen, *end], settings={})
    (folder.path / "lock").touch()
    require_one_source(folder.path)
    verdict = RunView.read(folder.path).verdict
    assert (verdict.word, verdict.best_step) == ("overfits" if end else "killed", 40)
