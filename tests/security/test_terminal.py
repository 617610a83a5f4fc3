"""Names, reasons and keys of a foreign run cannot command the terminal, and one that cannot be encoded ends no list."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.report_pages.runs import PLAN, ended, found, make_run, started, step
from trainwright.cli import app
from trainwright.report.pages.overview import RunShelf
from trainwright.report.pages.render import overview_page, runs_page
from trainwright.report.pages.report import write_report
from trainwright.report.runs import list_runs

EVIL = "\x1b[2J\x1b]0;gone\x07\u202e"
SHOWN = "\\x1b[2J\\x1b]0;gone\\x07\\u202e"


def invoke(*words: str) -> str:
    output = CliRunner().invoke(app, list(words)).output
    assert not {"\x1b", "\x07", "\u202e"} & {*output}, output
    output.encode()
    return output


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def test_the_name_of_a_run(runs: Path) -> None:
    make_run(runs, "run", [started(), step(1)]).path.rename(runs / EVIL)
    assert f"runs/{SHOWN}" in invoke("runs", "runs")
    assert SHOWN in invoke("diagnose", f"runs/{EVIL}") and SHOWN in invoke("diagnose", f"runs/{EVIL}x")
    assert SHOWN in invoke("report", f"runs/{EVIL}")


@pytest.mark.parametrize("command", ["runs", "diagnose", "compare"])
def test_the_end_of_a_run(runs: Path, command: str) -> None:
    for name in ("a", "b"):
        make_run(runs, name, [started(), step(1), ended(1, f"failed{EVIL}", f"no luck{EVIL}")])
    words = {"runs": ["runs"], "diagnose": ["runs/a"], "compare": ["runs/a", "runs/b"]}[command]
    assert f"failed{SHOWN}" in invoke(command, *words)


def test_values_of_a_plan_and_findings(runs: Path) -> None:
    for name, device in (("a", "cpu"), ("b", EVIL)):
        folder = make_run(runs, name, [started(), step(1), found(f"own.{EVIL}", text=EVIL)], settings={})
        folder.write_json("plan.json", {**PLAN, "device": device})
    assert SHOWN in invoke("compare", "runs/a", "runs/b")


def test_keys_and_values_of_a_recipe(runs: Path) -> None:
    Path("recipe.yaml").write_text(f'"{EVIL!r}": 1\n'.replace("'", ""))
    assert "is not a key of a recipe" in invoke("plan", "recipe.yaml")
    Path("recipe.yaml").write_text("model: mlp\ndata: {train: digits}\nname: " + json.dumps(EVIL) + "\n")
    assert "name" in invoke("plan", "recipe.yaml")
    assert SHOWN in invoke("plan", EVIL)


def test_a_name_that_is_not_utf8(runs: Path) -> None:
    make_run(runs, "good", [started(), step(1)])
    strange = os.fsdecode(os.fsencode(runs / "bad") + b"\xff")
    Path(make_run(runs, "bad", [started(), step(1), ended(1)]).path).rename(strange)
    assert "runs/bad\\udcff" in invoke("runs", "runs") and "runs/good" in invoke("runs", "runs")
    assert len(list_runs(runs).to_json()["runs"]) == 2  # type: ignore[arg-type]
    invoke("runs", "runs", "--json")
    shelf = RunShelf([runs])
    overview = shelf.overview()
    assert set(overview.views) == {"good", "bad\\udcff"}
    overview_page(overview).encode()
    runs_page([*overview.views.values()], names=[*overview.views], live=True).encode()
    write_report([Path(strange)])
    assert "bad\\udcff" in (Path(strange) / "report.html").read_text()


def test_a_file_of_a_distant_year(runs: Path) -> None:
    folder = make_run(runs, "run", [started(), step(1)])
    os.utime(folder.log, (2.0**38, 2.0**38))
    assert "runs/run" in invoke("runs", "runs")


@pytest.mark.parametrize("where", ["view", "page"])
def test_a_run_that_breaks_the_reader_is_listed_with_the_reason(
    runs: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The last resort: whatever is wrong with one run, the others are shown."""
    for name in ("bad", "good"):
        make_run(runs, name, [started(), step(1)])

    def breaks(path: Path) -> str:
        if "bad" in str(path):
            raise ZeroDivisionError(f"an odd file{EVIL}")
        return "running"

    if where == "view":
        monkeypatch.setattr(
            "trainwright.report.pages.log.IncrementalLog.advance", lambda log, for_s=0.0: breaks(log.path)
        )
        monkeypatch.setattr("trainwright.report.runs.state_of", lambda path, records: breaks(path))
        table = invoke("runs", "runs")
        assert "cannot be read: ZeroDivisionError: an odd file" in table and "runs/good" in table
    else:
        monkeypatch.setattr(
            "trainwright.report.pages.view.RunView.state", property(lambda view: breaks(view.folder.path))
        )
    page = overview_page(RunShelf([runs]).overview())
    assert 'data-name="bad" data-state="cannot be read"' in page and "ZeroDivisionError: an odd file" in page
    assert 'data-name="good" data-state="' in page
    head, *rows = page[page.index('<table id="runs">') : page.index("</table>")].split("<tr")[1:]
    assert len(rows) == 2 and {row.count("<td") for row in rows} == {head.count("<th")}
