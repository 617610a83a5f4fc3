"""Alerts: when and how they are sent, that they are sent again where nobody took them, and that no secret is kept."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainwright as tw
from tests.monitoring.webhook import Hook
from tests.report_pages.runs import ended, found, make_run, started, step
from trainwright.errors import RecipeError, UsageError
from trainwright.monitoring.alerts import (
    Alert,
    AlertRules,
    AlertWatch,
    Batcher,
    Command,
    NewRecords,
    NotDeliveredError,
    Webhook,
    desktop,
)
from trainwright.recipe import from_mapping
from trainwright.recipe.schema import Alerts
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import to_json
from trainwright.runs.writer import LogWriter

ALERT = Alert("loss", "the loss is <b>12 & more", 7)
PARTS: dict[str, Any] = {"model": {"use": "mlp", "args": {"sizes": [4, 2]}}, "data": {"train": "digits"}}


@pytest.fixture
def hook() -> Iterator[Hook]:
    server = Hook()
    yield server
    server.shutdown()
    server.server_close()


def section(**settings: object) -> Alerts:
    return Alerts.model_validate({"desktop": True, **settings})


AT_ONCE = section(loss_above=0.0, every="0.001s")


def never(text: str) -> None:
    raise AssertionError(text)


def test_a_finding_is_told_once_and_again_when_it_is_more_severe() -> None:
    state = AlertRules(section(finding="warning"), 0.0)
    info, warning, critical = (
        type(one)(**{**vars(one), "severity": severity})
        for one, severity in zip([found()] * 3, ("info", "warning", "critical"), strict=True)
    )
    told = [[each.text[:8] for each in state.of_record(one)] for one in (info, warning, warning, critical, warning)]
    assert told == [[], ["warning:"], [], ["critical"], []]
    (alert,) = state.of_record(found("data.nan", 9))
    assert (alert.kind, alert.step) == ("finding", 9) and "data.nan" in alert.text and "(remedy)" in alert.text


def test_a_loss_is_told_when_it_leaves_its_bound() -> None:
    state = AlertRules(section(loss_above=2.0), 0.0)
    losses = [1.0, 2.0, 3.0, 4.0, math.nan, 1.0, math.inf, 1.0, math.nan]
    told = [len(list(state.of_record(step(i, loss)))) for i, loss in enumerate(losses)]
    assert told == [0, 0, 1, 0, 0, 0, 1, 0, 1]
    assert not list(AlertRules(section(), 0.0).of_record(step(1, 1e9)))


def test_a_run_that_makes_no_step_is_told_once_each_time() -> None:
    state = AlertRules(section(no_step_for="10min", disk_below=None), 100.0)
    told = [
        [each.kind for each in state.of_time(at, None, 100.0 + now_s)]
        for at, now_s in ((0, 599), (0, 600), (0, 1900), (1, 2000), (1, 2599), (1, 2601), (2, 2602))
    ]
    assert told == [[], ["no_step"], [], [], [], ["no_step"], []]


def test_a_disk_that_hovers_at_its_bound_is_told_once() -> None:
    state = AlertRules(section(no_step_for=None, disk_below="100B"), 0.0)
    told = [len(list(state.of_time(1, free, 0.0))) for free in (None, 150, 99, 101, 99, 199, 50, 200, 99)]
    assert told == [0, 0, 1, 0, 0, 0, 0, 0, 1]


def test_the_end_is_told_with_its_reason() -> None:
    (alert,) = AlertRules(section(), 0.0).of_record(ended(9, "failed", "no memory"))
    assert alert.kind == "ended" and "(failed), loss 0.2: no memory" in alert.text
    assert not list(AlertRules(section(ended=False), 0.0).of_record(ended(9)))


def test_alerts_of_a_kind_wait_and_come_together() -> None:
    batcher = Batcher(300.0)
    batcher.add(ALERT)
    assert [each.text for each in batcher.due(0.0)] == ["step 7: the loss is <b>12 & more"]
    for number in range(13):
        batcher.add(Alert("loss", f"number {number}", number))
    batcher.add(Alert("disk", "full", 13))
    assert [each.kind for each in batcher.due(299.0)] == ["disk"] and batcher.due(299.5) == []
    (joined,) = batcher.due(300.0)
    assert joined.text.splitlines()[::10] == ["step 0: number 0", "and 3 more"] and joined.step == 12
    batcher.add(ALERT)
    assert batcher.due(301.0) == [] and len(batcher.due(301.0, all_of_them=True)) == 1


def test_a_webhook_gets_what_slack_takes(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK", hook.url)
    Webhook.of_variable("HOOK").send("my run", ALERT)
    assert hook.taken == [{"text": "my run: the loss is &lt;b&gt;12 &amp; more"}]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of imghdr, which apprise imports
def test_apprise_delivers_and_keeps_addresses_secret(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("apprise")
    from trainwright.monitoring.alerts import Apprise

    address = hook.url.replace("http://", "json://user:S3CRET@")
    monkeypatch.setenv("URLS", f" {address} ")
    Apprise.of_variable("URLS").send("my run", ALERT)
    assert hook.asked == 1
    with pytest.raises(UsageError, match="address 2 of 2") as refused:
        Apprise([address, "no-such-service://S3CRET"])
    with pytest.raises(NotDeliveredError) as failed:
        Apprise(["json://user:S3CRET@127.0.0.1:1"]).send("my run", ALERT)
    assert "S3CRET" not in f"{refused.value} {failed.value}"


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:1/S3CRET", "http://S3CRET.invalid/", "http://127.0.0.1:S3CRET/", "http://[S3CRET", "http://"],
)
def test_what_a_webhook_raises_has_no_address_in_it(url: str) -> None:
    with pytest.raises(NotDeliveredError) as raised:
        Webhook(url).send("run", ALERT)
    assert "S3CRET" not in str(raised.value) and raised.value.__suppress_context__
    assert "S3CRET" not in repr(Webhook(url))


@pytest.mark.process
def test_a_command_reads_the_alert(tmp_path: Path) -> None:
    script = tmp_path / "notify.sh"
    script.write_text(f"#!/bin/sh\ncat > '{tmp_path}/got'; [ \"$1\" != fail ] || exit 3\n")
    script.chmod(0o755)
    Command.of([str(script), "ok"]).send("my run", ALERT)
    assert json.loads((tmp_path / "got").read_text()) == {"run": "my run", **ALERT._asdict()}
    with pytest.raises(NotDeliveredError, match="ended with 3"):
        Command.of([str(script), "fail"]).send("my run", ALERT)


@pytest.mark.process
def test_the_desktop_gets_texts_that_are_no_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for program in ("notify-send", "osascript"):
        (tmp_path / program).write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > '{tmp_path}/got'\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    desktop("linux").send("--help", ALERT)
    assert (tmp_path / "got").read_text().splitlines()[1:] == ["--", "--help: loss", ALERT.text]
    desktop("darwin").send("run", ALERT)
    assert (tmp_path / "got").read_text().splitlines()[-2:] == ["run: loss", ALERT.text]
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match=r"no program notify-send(.|\n)*libnotify"):
        desktop("linux")


@pytest.mark.process
def test_what_is_missing_is_said_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NOT_AN_ADDRESS", "S3CRET")
    for alerts, said in (
        ({"apprise": "NO_SUCH_VARIABLE"}, r"alerts.apprise(.|\n)*NO_SUCH_VARIABLE is not set(.|\n)*export"),
        ({"webhook": "NO_SUCH_VARIABLE"}, r"NO_SUCH_VARIABLE is not set(.|\n)*export"),
        ({"webhook": "NOT_AN_ADDRESS"}, "NOT_AN_ADDRESS is not an address"),
        ({"command": ["no-such-program-here"]}, "no program no-such-program-here"),
    ):
        with pytest.raises(UsageError, match=said) as raised:
            tw.train(from_mapping({**PARTS, "alerts": alerts}), quiet=True)
        assert "S3CRET" not in str(raised.value)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("alerts", "said"),
    [
        ({"webhook": "https://hooks.slack.com/services/S3CRET"}, r"name of an environment variable"),
        ({"apprise": "tgram://S3CRET"}, r"name of an environment variable"),
        ({"finding": "warning"}, "have no destination"),
        ({"desktop": True, "no_step_for": "10steps"}, "must be a wall-clock time"),
        ({"desktop": True, "disk_below": "much"}, "not a size of memory"),
    ],
)
def test_a_recipe_that_cannot_be_meant(alerts: dict[str, object], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        from_mapping({**PARTS, "alerts": alerts})


def test_what_is_not_taken_is_sent_again(tmp_path: Path, hook: Hook) -> None:
    hook.failures = 2
    folder = make_run(tmp_path, "mine", [started(), found("old.one")])  # what was there before is not told
    log = LogWriter(folder.log)
    channel = Webhook(hook.url)
    with AlertWatch(folder, AT_ONCE, [channel], warn=never, poll_s=0.01, retry_s=[0.01] * 4):
        log.write(found("data.nan", 3))
        hook.wait()
        log.write(ended(4))
    hook.wait()
    assert (
        hook.asked == 4 and ["data.nan" in hook.taken[0]["text"], "(finished)" in hook.taken[1]["text"]] == [True] * 2
    )
    log.close()


def test_what_nobody_takes_is_said_once_and_training_goes_on(tmp_path: Path, hook: Hook) -> None:
    hook.failures, said = 10**6, list[str]()
    folder = make_run(tmp_path, "mine", [started()])
    log = LogWriter(folder.log)
    with AlertWatch(folder, AT_ONCE, [Webhook(hook.url)], warn=said.append, poll_s=0.01, retry_s=[0.01] * 2):
        log.write(step(1))
        log.write(found())
    assert said == ["alerts: the webhook failed in all 3 attempts: the server answered 500"] and hook.asked == 6
    log.close()


def test_the_end_does_not_wait_for_tries_that_come_too_late(tmp_path: Path, hook: Hook) -> None:
    """Nor for a second one, where a channel was given up before."""
    hook.failures, said = 10**6, list[str]()
    log = LogWriter(make_run(tmp_path, "mine", [started()]).log)
    channel = Webhook(hook.url)
    options: dict[str, Any] = {"warn": said.append, "poll_s": 0.01}
    with AlertWatch(RunFolder(tmp_path / "mine"), AT_ONCE, [channel], **options, retry_s=[0.01, 3600.0]):
        log.write(step(1))
    assert hook.asked == 2
    assert said == ["not all alerts were delivered before the end (the webhook: the server answered 500)"]
    with AlertWatch(RunFolder(tmp_path / "mine"), AT_ONCE, [channel], **options, retry_s=[0.01]) as watch:
        log.write(step(2))
        while len(said) < 2:
            watch.note(2)
        asked = hook.asked
        log.write(ended(2))
    late = ["alerts: the webhook failed in all 2 attempts: the server answered 500"]
    assert (hook.asked, said[1:]) == (asked + 1, late)
    log.close()


def test_new_records_are_read_once_and_never_from_a_pipe(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(to_json(step(1)) + "\n")
    new, second = NewRecords(log), to_json(step(2)) + "\n"
    with log.open("a") as file:
        for part in (second[:9], second[9:]):
            assert [*new.read()] == []
            file.write(part)
            file.flush()
    assert [*new.read()] == [step(2)] and [*new.read()] == []
    log.unlink()
    os.mkfifo(log)
    assert [*new.read()] == []


@pytest.mark.process
@pytest.mark.slow
def test_a_step_that_hangs_is_told_while_it_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: Hook) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_HOOK", hook.url)
    settings = {"alerts.webhook": "MY_HOOK", "alerts.no_step_for": "0.2s", "alerts.finding": None, "log.doctor": False}

    def hang(result: tw.StepResult, state: tw.TrainState) -> None:
        if result.step == 2:
            hook.wait()  # until somebody is told that no step is completed

    data, loss = (torch.randn(16, 4), torch.arange(16) % 2), nn.CrossEntropyLoss()
    result = tw.fit(nn.Linear(4, 2), data, loss, steps=6, batch=4, quiet=True, settings=settings, observers=[hang])
    assert result.ending == "finished" and "no step was completed for" in hook.taken[0]["text"]
    assert any("the run ended (finished)" in each["text"] for each in hook.taken)
    written = b"".join(path.read_bytes() for path in result.run.rglob("*") if path.is_file())
    assert b"MY_HOOK" in written and b"S3CRET" not in written


@pytest.mark.process
@pytest.mark.slow
def test_a_run_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = "import sys, pathlib; pathlib.Path('got').write_text(sys.stdin.read())"
    settings = {"alerts.command": [sys.executable, "-c", code], "alerts.finding": None, "log.doctor": False}

    def stop(result: tw.StepResult, state: tw.TrainState) -> None:
        raise RuntimeError("this one fails")

    data = (torch.randn(16, 4), torch.arange(16) % 2)
    with pytest.raises(RuntimeError, match="this one"):
        tw.fit(nn.Linear(4, 2), data, nn.CrossEntropyLoss(), steps=3, quiet=True, settings=settings, observers=[stop])
    told = json.loads(Path("got").read_text())
    assert (told["run"], told["kind"]) == ("run", "ended") and "(failed): RuntimeError: this one fails" in told["text"]
