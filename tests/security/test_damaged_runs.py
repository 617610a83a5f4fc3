"""Commands that only read a run folder end soon, in little memory and with a clear message, whatever is in it."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.security.damaged import DAMAGES, make_whole_run, mutants, removed
from trainwright.cli import app
from trainwright.report.diagnosis import diagnosis_of
from trainwright.report.pages.compare import RunComparison
from trainwright.report.pages.overview import RunShelf
from trainwright.report.pages.render import overview_page
from trainwright.report.pages.report import write_report
from trainwright.report.pages.view import RunView
from trainwright.report.runs import list_runs
from trainwright.report.server.server import PageServer, PageState
from trainwright.runs.folder import RunFolder
from trainwright.runs.printing import printable

pytestmark = [pytest.mark.examined, pytest.mark.slow]

MOST_BYTES = 2**27
"""Maximum memory of a command, for files of any size."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whole_run(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def bad(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to damage, beside another one."""
    monkeypatch.chdir(tmp_path)
    for name in ("bad", "other"):
        shutil.copytree(whole, Path("runs") / name)
    return Path("runs/bad")


def memory_bytes(name: str) -> int:
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


@contextmanager
def in_little_memory() -> Iterator[None]:
    """tracemalloc would take several times as long as the commands."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is the memory of now
    before = memory_bytes("VmRSS")
    yield
    assert memory_bytes("VmHWM") - before < MOST_BYTES


def test_much_memory_is_seen() -> None:
    with pytest.raises(AssertionError), in_little_memory():
        assert len(b"1" * (MOST_BYTES + 2**22)) > MOST_BYTES


def invoke(*words: str) -> str:
    """The output of a command, which either does its work or says what is wrong and what to do."""
    done = CliRunner().invoke(app, list(words))
    assert done.exception is None or isinstance(done.exception, SystemExit), (words, done.exc_info)
    said = " ".join(done.output.split())
    assert "Traceback" not in said and "examine that line" not in said and "\x1b" not in said, (words, said)
    assert done.exit_code in (0, 3) or "remedy: " in said or said.startswith("broken "), (words, said)
    return said


def listed() -> None:
    """All runs are listed, and the one beside it as ever."""
    said, page = invoke("runs", "runs"), overview_page(RunShelf([Path("runs")]).overview())
    assert "runs/other" in said and "finished" in said and 'data-name="other" data-state="finished"' in page


def served() -> None:
    """The page of the run, alone and beside another, and what is new of it."""
    server = PageServer(RunShelf([Path("runs")]))
    for names in (["bad"], ["bad", "other"]):
        if "bad" not in RunShelf([Path("runs")]).runs():
            continue
        page = server._page(names)
        page.encode()
        assert "root:x:0" not in page
        json.dumps(server.news(names, [PageState(), PageState()]), ensure_ascii=False, allow_nan=False).encode()
    server._reading.shutdown()


ACTS: dict[str, Callable[[], object]] = {
    "diagnose": lambda: invoke("diagnose", "runs/bad"),
    "deep": lambda: invoke("diagnose", "runs/bad", "--deep"),
    "checks": lambda: invoke("checks", "runs/bad"),
    "runs": listed,
    "serve": served,
    "report": lambda: invoke("report", "runs/bad"),
    "compare": lambda: [invoke("compare", "runs/bad", "runs/other"), invoke("compare", "runs/other", "runs/bad")],
    "verify": lambda: invoke("verify", "checkpoint", "runs/bad"),
    "export": lambda: [removed(Path("out")), invoke("export", "runs/bad", "--out", "out")],
    "resume": lambda: invoke("resume", "runs/bad"),
    "replay": lambda: invoke("replay", "runs/bad", "--step", "3"),
}
SHOWN = ("report", "serve", "compare")
STEP = "checkpoints/step-00000008"
READ_BY = {
    "log.jsonl": ("diagnose", "deep", "checks", "runs", *SHOWN),
    "recipe.yaml": ("diagnose", "runs", "export", "resume", "replay", *SHOWN),
    **dict.fromkeys(("plan.json", "provenance.json"), ("runs", *SHOWN)),
    **dict.fromkeys(("model.json", "profile.json", "errors.json", "supervision.json", "graph.svg"), SHOWN[:2]),
    **dict.fromkeys(("samples", "samples/samples.txt"), SHOWN[:2]),
    "lock": ("runs", "serve", "resume"),
    "report.html": ("report",),
    "run-id": ("export", "resume"),
    **dict.fromkeys(("checkpoints", "checkpoints/best.json", STEP), ("verify", "export")),
    f"{STEP}/manifest.json": ("verify", "export", "resume"),
    **dict.fromkeys((f"{STEP}/{name}" for name in ("state.json", "model.safetensors")), ("verify", "export")),
}
BY_ALL = ("pipe", "sparse")
"""Damages that each command is tried on. Each file has half of the others, and each of them goes to one command that
reads the file, by turns."""


@pytest.mark.parametrize("name", READ_BY)
def test_a_file_of_another_kind_or_content(bad: Path, whole: Path, name: str) -> None:
    half = [*READ_BY].index(name) % 2
    for number, (kind, damage) in enumerate(DAMAGES.items()):
        if kind not in BY_ALL and number % 2 != half:
            continue
        damage(bad / name)
        with in_little_memory() if kind == "sparse" else nullcontext():
            for act in READ_BY[name] if kind in BY_ALL else [READ_BY[name][number // 2 % len(READ_BY[name])]]:
                ACTS[act]()
        shutil.rmtree(bad)
        shutil.copytree(whole, bad)


def test_the_reason_is_shown(bad: Path) -> None:
    """Where a list or a page shows the rest all the same."""
    for name in ("log.jsonl", "plan.json"):
        DAMAGES["pipe"](bad / name)
    assert "cannot be read: log.jsonl: it is a pipe" in invoke("runs", "runs")
    assert "log.jsonl cannot be read: it is a pipe" in invoke("diagnose", "runs/bad")
    invoke("report", "runs/bad")
    page = (bad / "report.html").read_text()
    assert "log.jsonl cannot be read: it is a pipe" in page and "plan.json cannot be read: it is a pipe" in page


@pytest.mark.parametrize(
    "name", ["plan.json", "provenance.json", "model.json", "profile.json", "errors.json", "supervision.json"]
)
def test_a_value_that_no_run_writes(bad: Path, name: str) -> None:
    value, other = json.loads((bad / name).read_text()), RunView.read("runs/other")
    for number, text in enumerate(mutants(value)):
        (bad / name).write_text(text)
        if name in ("plan.json", "provenance.json") and number % 2:
            view = RunView.read(bad)
            pair = [view, other] if number % 4 == 1 else [other, view]
            assert all(printable(line).encode() for line in RunComparison.of(pair).lines())
        else:
            write_report([bad], Path("report.html"))


def one_of_each_kind(log: Path) -> Iterator[tuple[str, Callable[[str], None]]]:
    """The first record of each kind, of experiments of each, and what writes the log with another line in its place."""
    lines, seen = log.read_text().splitlines(), set[str]()

    def write(line: str, index: int) -> None:
        log.write_text("\n".join([*lines[:index], line, *lines[index + 1 :]]) + "\n")

    for index, line in enumerate(lines):
        record = json.loads(line)
        kind = record["kind"] + str(record.get("experiment", ""))
        if kind not in seen:
            seen.add(kind)
            yield line, partial(write, index=index)


def test_a_record_that_no_run_writes(bad: Path) -> None:
    server = PageServer(RunShelf([Path("runs")]))
    for number, (line, write) in enumerate(one_of_each_kind(bad / "log.jsonl")):
        if '"kind":"examined"' in line:
            continue
        for text in mutants(json.loads(line), number):
            write(text)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                states = [row.state for row in list_runs(Path("runs")).rows]
                news = json.dumps(server.news(["bad"], [PageState()]), allow_nan=False)
            assert not [each for each in [*states, news] if "cannot be read" in each], text
    server._reading.shutdown()


def test_a_diagnosis_of_values_that_no_run_writes(bad: Path) -> None:
    count = 0
    for number, (line, write) in enumerate(one_of_each_kind(bad / "log.jsonl")):
        kind = json.loads(line)["kind"]
        if kind not in ("examined", "unexamined", "watched", "found", "ended", "started"):
            continue
        for text in [*mutants(json.loads(line), number)][:: 9 if kind == "examined" else 3]:
            write(text)
            assert all(map(printable, diagnosis_of(RunFolder(bad)).lines()))
            count += 1
    assert count > 50
