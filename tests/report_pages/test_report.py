"""``trainwright report``: one file, complete in itself, that shows every state of a run and trusts no text."""

from __future__ import annotations

import base64
import html
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.report_pages.reading import Page, curves_of
from tests.report_pages.runs import BEGAN_S, PLAN, ended, evaluated, found, make_run, started, step
from trainwright.cli import app
from trainwright.report.pages.report import leave_report, write_report
from trainwright.report.pages.view import RunView
from trainwright.runs.folder import RunFolder
from trainwright.runs.lock import RunLock
from trainwright.runs.records import Logged, NotSaved, Quarantined, Saved, Skipped, Telemetry, to_json
from trainwright.runs.supervision import DecodedSample, LossCount, MarkedText, Supervision, SupervisionFinding


def page_of(folder: RunFolder) -> Page:
    return Page(write_report([folder.path]).path.read_text())


def test_a_report_shows_what_carries_loss(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "tuned", [started(), step(1), ended(1)])
    sample = DecodedSample("chats.jsonl:1", (MarkedText("<|user|><b>Hi</b>", False), MarkedText("Hello", True)))
    remedy = "fill in the answer"
    finding = SupervisionFinding(
        "empty_answer", "warning", "1 sequence has an empty answer", remedy, 1, "chats.jsonl:7"
    )
    audit = Supervision(
        *("train", "tokens", "train_on: assistant", 3, 3, 1, 1000, 250),
        roles=(LossCount("user", 700, 0), LossCount("assistant", 300, 250)),
        findings=(finding,),
        decoded=(sample,),
    )
    folder.write_json("supervision.json", [audit])
    text = write_report([folder.path]).path.read_text()
    for shown in ("25.0 % of 1,000 tokens", "83.3 %", "empty answer", remedy, "chats.jsonl:1", "<mark>Hello</mark>"):
        assert shown in text, shown
    assert "&lt;|user|&gt;&lt;b&gt;Hi" in text and "<b>Hi" not in text


def test_a_report_shows_the_run(tmp_path: Path) -> None:
    records = [
        started(),
        *(step(number, math.nan if number == 33 else None) for number in range(1, 101)),
        evaluated(50, 0.7),
        found(),
        Saved(time_s=BEGAN_S, step=50, path="checkpoints/step-00000050", bytes=2**20, seconds=1.0),
        NotSaved(time_s=BEGAN_S, step=60, reason="the disk is full"),
        Quarantined(time_s=BEGAN_S, step=7, sample_ids=(41,), reason="cannot be read"),
        Skipped(
            time_s=BEGAN_S,
            step=33,
            reason="nan in x",
            micro_batch=0,
            sample_ids=(5,),
            scale_before=None,
            scale_after=None,
        ),
        ended(100),
    ]
    page = page_of(make_run(tmp_path, "healthy", records, settings={"optimizer.lr": 0.003}))
    for shown in (
        *("healthy", "finished", "the loss jumps (symptom)", "the loss jumps (cause)", "the loss jumps (remedy)"),
        *("since step 18", "90% sure", "the loss jumps.py:12", "3.5", "the loss jumps (a tenth)", "loss 2 -> 1"),
        *("checkpoints/step-00000050", "the disk is full", "cannot be read", "nan in x", "measured", "host-of-healthy"),
        *("accuracy 0.5", "lr: 0.003", "1,234"),
    ):
        assert shown in page.text, shown
    (run,) = curves_of(page)
    assert run["columns"]["loss"][32] == "n" and len(run["columns"]["loss"]) == 100
    assert run["columns"]["samples"][:2] == [32, 64] and run["columns"]["seconds"][-1] == 100
    assert run["evaluations"] == {"step": [50], "loss": [0.7], "seconds": [50], "samples": [1600], "tokens": [0]}
    assert [(pin["step"], pin["kind"], pin["finding"]) for pin in run["pins"]] == [(18, "critical", 0)]
    assert run["planned_bytes"] == 4936 + 65536


def test_what_a_code_means_is_told_with_it(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path, "run", [step(1), found("loss.softmax_before_cross_entropy")]))
    assert "How it is detected" in page.text
    own = page_of(make_run(tmp_path, "own", [step(1), found("own.mine")]))
    assert "own.mine" in own.text and "How it is detected" not in own.text


TREE = {"name": "", "kind": "GPT", "parameters": 12, "trained": 12, "count": 1, "last": "", "children": []}


def test_a_report_shows_the_model_the_machine_and_what_was_written(tmp_path: Path) -> None:
    readings = [
        Telemetry(time_s=BEGAN_S + n, step=n, values={"gpu0/busy_percent": 90.0 + n, "host/x": 1.0}) for n in (1, 2)
    ]
    folder = make_run(tmp_path, "run", [started(), step(1), step(2), *readings, ended(2)], settings={})
    block = {**TREE, "name": "0", "last": "5", "count": 6, "kind": "Block", "parameters": 2, "trained": 0}
    facts = {"modules": [{**TREE, "children": [block]}], "reference_losses": {"bigram": 2.5, "odd": "x", "off": -1}}
    folder.write_json("model.json", facts)
    folder.write_text("samples/samples.txt", "--- 25% of the run\nonce <b>upon</b> a time\n")
    folder.write_text("graph.svg", "<svg>the graph</svg>")
    header = {"settings": [{"name": "clip", "value": "norm at 1", "origin": "recommended", "why": "by the preset"}]}
    folder.write_json("plan.json", {**PLAN, "expected_loss": 2.5001, "device": "cpu", "header": header})
    page = page_of(folder)
    for shown in ("GPT", "Block", "0 to 5", "\u00d7 6", "2 each, frozen", "100%", "once <b>upon</b> a time"):
        assert shown in page.text, shown
    assert "clip norm at 1 recommended by the preset" in " ".join(page.text.split())
    pictures = [named["src"] or "" for tag, named in page.tags if tag == "img"]
    assert [base64.b64decode(each.rpartition(",")[2]).decode() for each in pictures] == ["<svg>the graph</svg>"]
    assert "trainwright plan RUN" in page.text and "trainwright graph RUN" not in page.text
    (run,) = curves_of(page)
    assert run["references"] == {"bigram": 2.5}, "a mark of the same loss is told once"
    assert run["readings"]["gpu0/busy_percent"] == [91, 92] and run["readings"]["samples"] == [32, 64]
    assert run["planned_bytes"] is None, "of a CPU it is known what the process holds, not what the tensors do"


@pytest.mark.parametrize("modules", [[1], [{**TREE, "children": [{"name": "x"}]}], [{**TREE, "count": "6"}], {}, "x"])
def test_a_tree_that_is_none_is_left_out(tmp_path: Path, modules: object) -> None:
    folder = make_run(tmp_path, "run", [step(1)])
    folder.write_json("model.json", {"modules": modules, "reference_losses": [3]})
    folder.write_json("plan.json", {**PLAN, "header": modules})
    page = page_of(folder)
    assert "run" in page.text and "meter" not in {tag for tag, _ in page.tags}
    deep: Any = TREE
    for _ in range(90):
        deep = {**TREE, "children": [deep]}
    folder.write_json("model.json", {"modules": [deep]})
    assert "GPT" not in page_of(folder).text


def test_a_disabled_doctor_is_shown(tmp_path: Path) -> None:
    off = page_of(make_run(tmp_path, "off", [step(1)], settings={"log.doctor": False}))
    on = page_of(make_run(tmp_path, "on", [step(1)], settings={}))
    assert "Not examined" in off.text and "No findings" in on.text and "Not examined" not in on.text


EVIL = "<script>alert(1)</script><img src=x onerror=alert(1)>'\"&"


def test_no_text_of_a_run_becomes_markup(tmp_path: Path) -> None:
    folder = make_run(
        tmp_path,
        "evil",
        [started(), step(1), found("a.b", text=EVIL), found(EVIL), ended(1, "failed", EVIL)],
        settings={},
    )
    folder.recipe.write_text(f"# {EVIL}\nmodel: '</script>'\n")
    header = {"settings": [{"name": EVIL, "value": EVIL, "origin": EVIL}, 3]}
    notes = [{"topic": EVIL, "choice": EVIL, "why": EVIL}]
    folder.write_json("plan.json", {**PLAN, "notes": notes, "header": header, EVIL: EVIL})
    folder.write_json("provenance.json", {"command": [EVIL], EVIL: EVIL})
    folder.write_json("model.json", {"modules": [{**TREE, "kind": EVIL}], "reference_losses": {EVIL: 1.0}})
    folder.write_text("samples/samples.txt", EVIL)
    evil_name = folder.path.rename(tmp_path / "<script>alert(2)<|script>")
    text = write_report([evil_name]).path.read_text()
    page = Page(text)
    assert [tag for tag, _ in page.tags].count("script") == 2 and "img" not in {tag for tag, _ in page.tags}
    assert "alert(1)" in page.text and "alert(2)" in page.text, "it is shown as text"
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert EVIL not in text and json.loads(page.data)["runs"][0]["pins"][1]["label"] == EVIL


def test_a_report_asks_for_nothing(tmp_path: Path) -> None:
    text = write_report([make_run(tmp_path, "run", [step(1)]).path]).path.read_text()
    page = Page(text)
    attributes = [value or "" for _, named in page.tags for name, value in named.items() if name in ("src", "href")]
    assert attributes == ["data:,"]
    policy = next(named["content"] for _, named in page.tags if named.get("http-equiv") == "Content-Security-Policy")
    assert policy and policy.startswith("default-src 'none'; script-src 'sha256-") and "connect-src 'none'" in policy
    assert "unsafe" not in policy and not re.search(r"url\(|@import", text)


def test_each_state_is_told(tmp_path: Path) -> None:
    def state(records: list[Any], name: str) -> str:
        return RunView.read(make_run(tmp_path, name, records).path).state

    assert state([started(), step(1), ended(1)], "a") == "finished"
    assert state([started(), step(1), ended(1, "stopped", "SIGTERM")], "b") == "stopped"
    assert state([started(), step(1), ended(1), started(1)], "c") == "no end record", "a copy without its lock"
    running = make_run(tmp_path, "d", [started(), step(1)], settings={})
    lock = RunLock.acquire(running.path)
    view = RunView.read(running.path)
    assert view.state == "running" and view.left_s == 99 * 0.5
    lock.release(clean=True)
    assert RunView.read(running.path).state == "killed" and RunView.read(running.path).left_s is None
    assert "none of its processes is left" in page_of(running).text


@pytest.mark.slow
def test_a_report_of_100_000_steps_stays_small(tmp_path: Path) -> None:
    """And keeps its peak."""
    folder = make_run(tmp_path, "long", [])
    line = to_json(step(7, 0.125, at_s=BEGAN_S))
    before, after = line.split('"step":7,"loss":0.125')
    losses = [2.0 + math.sin(number) for number in range(100_001)]
    losses[54_321] = 1e4
    folder.log.write_text("".join(f'{before}"step":{n},"loss":{losses[n]}{after}\n' for n in range(1, 100_001)))
    written = write_report([folder.path])
    assert written.bytes < 1_000_000
    columns = curves_of(Page(written.path.read_text()))[0]["columns"]
    assert columns["loss"][columns["step"].index(54_321)] == 10_000 and columns["step"][-1] == 100_000


def test_what_a_run_lacks_or_has_broken_is_left_out(tmp_path: Path) -> None:
    empty = RunFolder.create(tmp_path, "empty")
    empty.recipe.write_text("{")
    empty.plan.write_text("[1, 2")
    assert "empty" in page_of(empty).text
    odd = make_run(tmp_path, "odd", [step(1)])
    odd.plan.write_text('{"extent": 3, "notes": [1, {"topic": 2}], "memory_bytes": [], "parameters": "many"}')
    odd.provenance.write_text("[" * 100_000)
    odd.recipe.mkdir()
    assert "odd" in page_of(odd).text


def test_no_link_leads_out_of_a_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", [step(1)])
    (tmp_path / "secret").write_text("model: hunter2")
    for file in (folder.recipe, folder.plan, folder.provenance, folder.path / "graph.svg"):
        file.symlink_to(tmp_path / "secret")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "samples.txt").write_text("hunter2")
    folder.samples.symlink_to(tmp_path / "elsewhere")
    assert "hunter2" not in html.unescape(write_report([folder.path]).path.read_text())


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    folder, said = make_run(tmp_path, "run", [step(1)]), list[str]()
    (folder.path / "report.html").mkdir()
    leave_report(folder, said.append)
    assert len(said) == 1 and said[0].startswith("no report.html: cannot write")
    leave_report(RunFolder(tmp_path / "gone"), said.append)
    assert len(said) == 1 and not list(folder.path.glob(".*.draft"))


def test_the_verb_writes_one_file_of_several_runs(tmp_path: Path) -> None:
    paths = [str(make_run(tmp_path, name, [step(1), ended(1)]).path) for name in ("one", "two")]
    done = CliRunner().invoke(app, ["report", *paths, "--out", str(tmp_path / "both.html"), "--json"])
    said = json.loads(done.output)
    assert said["runs"] == ["one", "two"] and said["bytes"] == (tmp_path / "both.html").stat().st_size
    assert len(curves_of(Page((tmp_path / "both.html").read_text()))) == 2
    alone = CliRunner().invoke(app, ["report", paths[0]])
    assert "one/report.html" in alone.output and (tmp_path / "one/report.html").is_file()
    assert CliRunner().invoke(app, ["report", str(tmp_path / "three")]).exit_code == 2


@pytest.mark.parametrize("field", ["loss", "grad_norm"])
def test_a_curve_that_is_never_finite_is_drawn_as_such(tmp_path: Path, field: str) -> None:
    values = {"loss": math.nan} if field == "loss" else {"loss": 1.0, "grad_norm": math.inf}
    (run,) = curves_of(page_of(make_run(tmp_path, "run", [step(1, **values), step(2, **values)])))
    assert run["columns"][field] == ["n", "n"]


def test_figures_are_grouped_by_name(tmp_path: Path) -> None:
    """The series of training and validation of a metric are in one chart; what a watched loop logs is there too."""
    steps = [replace(step(number), probed={"f1": number / 100, "kl": 2.0}) for number in (10, 20)]
    evaluations = [replace(evaluated(20, 0.5), metrics={"f1": 0.3, "noisy.f1": 0.2, "noisy.loss": 0.7})]
    logged = [Logged(time_s=BEGAN_S + at, step=at, figures={"val_loss": 1.0 / at, "reward": at}) for at in (10, 20)]
    folder = make_run(tmp_path, "run", [started(), *steps, *evaluations, *logged])
    (run,) = curves_of(page_of(folder))
    found = {each["name"]: {one["label"]: one["value"] for one in each["series"]} for each in run["figures"]}
    assert found == {
        "f1": {"train": [0.1, 0.2], "validation": [0.3], "noisy": [0.2]},
        "kl": {"train": [2.0, 2.0]},
        "loss": {"noisy": [0.7], "val": [0.1, 0.05]},
        "reward": {"reward": [10.0, 20.0]},
    }
