"""Tags, notes, panels and columns are kept beside the runs, which stay as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.report_pages.runs import ended, evaluated, make_run, step
from trainwright.cli import app
from trainwright.errors import UsageError
from trainwright.report.marks import NAME, Marks, Panel, mark_run, marks_of, read_marks, write_marks
from trainwright.report.pages.overview import Overview, RunShelf
from trainwright.report.pages.render import overview_page, runs_page
from trainwright.report.pages.view import RunView
from trainwright.runs.files import UnreadableFile
from trainwright.runs.folder import RunFolder, ensure_identity


@pytest.fixture
def run(tmp_path: Path) -> Path:
    records = [step(1), evaluated(1, 0.5), ended(1)]
    return make_run(tmp_path, "run", records, settings={"optimizer.lr": 0.25}).path


def files_of(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}


def runs_json(*arguments: str) -> list[dict[str, object]]:
    said = CliRunner().invoke(app, ["runs", *arguments, "--json"])
    assert said.exit_code == 0, said.output
    found: list[dict[str, object]] = json.loads(said.stdout)["runs"]
    return found


def test_the_command_changes_tags_and_lists_by_them(run: Path) -> None:
    make_run(run.parent, "other", [step(1)])
    before = files_of(run)
    (row,) = runs_json(str(run), "--tag", "good", "--tag", "to repeat", "--note", "the first")
    assert (row["tags"], row["note"]) == (["good", "to repeat"], "the first")
    (row,) = runs_json(str(run), "--untag", "good")
    assert (row["tags"], row["note"]) == (["to repeat"], "the first")
    assert [each["run"] for each in runs_json(str(run.parent), "--tagged", "to repeat")] == [str(run)]
    assert len(runs_json(str(run.parent))) == 2 and runs_json(str(run.parent), "--tagged", "good") == []
    assert files_of(run) == before


@pytest.mark.parametrize("tag", ["a,b", "", " ", "x" * 81, "a\nb"], ids=["comma", "empty", "space", "long", "line"])
def test_what_is_no_tag_is_refused(run: Path, tag: str) -> None:
    with pytest.raises(UsageError, match="cannot be kept"):
        mark_run(run, tags=["good", tag])
    assert marks_of(run).tags == [] and not (run.parent / NAME).exists()


def test_a_renamed_run_keeps_its_marks_and_a_new_one_of_its_name_gets_none(run: Path) -> None:
    ensure_identity(RunFolder(run))
    mark_run(run, tags=["good"])
    renamed = run.rename(run.parent / "renamed")
    again = make_run(run.parent, "run", [step(1)]).path
    assert (marks_of(renamed).tags, marks_of(again).tags) == (["good"], [])
    assert RunView.read(renamed).marks.tags == ["good"] and RunView.read(again).marks.tags == []


def test_marks_that_an_older_version_kept_by_name_are_moved_at_the_next_change(run: Path) -> None:
    mark_run(run, tags=["good"], note="old")
    identity = ensure_identity(RunFolder(run))
    assert marks_of(run).tags == ["good"]
    mark_run(run, tags=["better"])
    assert read_marks(run.parent).runs.keys() == {identity}
    assert (marks_of(run).tags, marks_of(run).note) == (["better"], "old")


def test_marks_that_cannot_be_read_are_not_replaced(run: Path) -> None:
    (run.parent / NAME).write_text("{")
    with pytest.raises(UnreadableFile):
        mark_run(run, tags=["good"])
    assert (run.parent / NAME).read_text() == "{"
    assert f"{NAME} cannot be read" in runs_page([RunView.read(run)])


def test_fields_of_another_version_are_kept(run: Path) -> None:
    (run.parent / NAME).write_text('{"colours": ["red"], "runs": {"gone": {"tags": ["old"]}}}')
    mark_run(run, note="new")
    read = json.loads((run.parent / NAME).read_text())
    assert read["colours"] == ["red"] and read["runs"]["gone"]["tags"] == ["old"]
    assert read["runs"]["run"] == {"tags": [], "note": "new"}


def test_pages_show_marks_as_text(run: Path) -> None:
    mark_run(run, tags=["<b>bold</b>"], note="<script>alert(1)</script>")
    panel = Panel(name="</script>", metrics=["loss"])
    write_marks(run.parent, read_marks(run.parent).model_copy(update={"panels": [panel]}))
    report, listed = runs_page([RunView.read(run)]), overview_page(RunShelf([run.parent]).overview())
    for page in (report, listed):
        assert "&lt;b&gt;bold&lt;/b&gt;" in page and "&lt;script&gt;alert(1)&lt;/script&gt;" in page
        assert "<b>bold" not in page and "<script>alert" not in page
    assert '"panels":[{"name":"\\u003c/script\\u003e"' in report and 'id="panels-form"' not in report


def test_columns_are_metrics_and_keys(run: Path) -> None:
    write_marks(run.parent, Marks(columns=["optimizer.lr", "validation.accuracy", "device", "nothing"]))
    overview = RunShelf([run.parent]).overview()
    assert list(overview.columns) == ["optimizer.lr", "validation.accuracy", "device", "nothing"]
    (view,) = overview.views.values()
    assert [view.value_of(each) for each in overview.columns] == ["0.25", "0.5", "auto", ""]
    page = overview_page(overview)
    assert '<td data-label="optimizer.lr" data-value="0.25">0.25</td>' in page
    assert page.count("<th ") == page.count("<td ", page.index("<tbody>"))
    broken = overview_page(Overview({}, {"bad": "why"}, overview.columns))
    assert broken.count("<th ") == broken.count("<td ", broken.index("<tbody>"))
