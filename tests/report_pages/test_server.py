"""``trainwright serve``: who may ask, what can be asked for, and that what is new comes by itself."""

from __future__ import annotations

import http.client
import json
import signal
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests import forked
from tests.report_pages.runs import BEGAN_S, add, ended, evaluated, found, make_run, started, step
from tests.report_pages.serving import TOKEN, Site, site_of
from trainwright.cli import app
from trainwright.report.marks import marks_of
from trainwright.report.pages import overview
from trainwright.report.pages.overview import RunShelf
from trainwright.report.server import server as server_module
from trainwright.report.server.serve import BACKGROUND_SERVERS, open_listener, serve_in_background
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import to_json

pytestmark = pytest.mark.slow  # a server for each


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("hunter2")
    root = tmp_path / "runs"
    make_run(root, "healthy", [started(), *map(step, range(1, 21)), evaluated(20, 0.5), ended(20)], settings={})
    make_run(root, "ill", [started(), *map(step, range(1, 6)), found(at_step=4)], settings={"optimizer.lr": 0.5})
    return root


@pytest.fixture(autouse=True)
def always_refreshed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of runs is read at each request, so that no test waits for its age."""
    monkeypatch.setattr(overview, "REFRESH_S", -1.0)


@pytest.fixture
def site(runs: Path) -> Iterator[Site]:
    with site_of(runs) as opened:
        yield opened


def test_the_token_is_asked_for_once_and_then_a_cookie_does(site: Site) -> None:
    first = site.ask(f"/view?run=ill&token={TOKEN}", headers={})
    assert (first.status, first.headers["location"]) == (303, "view?run=ill") and "HttpOnly" in first.headers[
        "set-cookie"
    ]
    assert "path=" not in first.headers["set-cookie"].lower(), "behind a proxy the path is another one"
    assert site.ask(f"/?token={TOKEN}", headers={}).headers["location"] == "./"
    assert site.ask("/view?run=ill", headers={"Cookie": first.headers["set-cookie"].partition(";")[0]}).status == 200
    for path in ("/", "/view?run=ill", "/data?run=ill", "/events?run=ill", "/runs-data", "/runs-events", "/nothing"):
        assert site.ask(path, headers={}).status == 403
        assert site.ask(path, headers={"Cookie": f"trainwright-{site.port}=wrong"}).status == 403
    assert site.ask("/?token=wrong").status == 200, "the cookie is right"
    assert site.ask("/?token=wrong", headers={}).status == 403 and site.ask("/?token=%ff", headers={}).status == 403


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::2]:1"])
def test_a_foreign_name_of_this_machine_is_refused(site: Site, host: str) -> None:
    assert site.ask("/", headers={**site.cookie, "Host": host}).status == 400
    assert site.ask(f"/?token={TOKEN}", headers={"Host": host}).status == 400


def test_names_of_the_loopback_are_ours(site: Site) -> None:
    for host in ("localhost", "LOCALHOST:1", "[::1]:8787", "127.0.0.1"):
        assert site.ask("/", headers={**site.cookie, "Host": host}).status == 200


def test_nothing_outside_of_the_runs_can_be_asked_for(site: Site, runs: Path) -> None:
    (runs / "away").symlink_to(runs.parent, target_is_directory=True)
    (runs.parent / "log.jsonl").write_text(to_json(step(1)) + "\n")  # a run, but outside
    for path in ("/../secret", "/%2e%2e/secret", "/runs/../../secret", "/healthy/log.jsonl", "/etc/passwd", "//secret"):
        assert site.ask(path).status == 404, path
    for name in ("../secret", "..", ".", "", "/etc", "healthy/..", "away", "%00", "healthy%00", "runs", "nothing"):
        for what in ("view", "data", "events"):
            assert site.ask(f"/{what}?run={name}").status == 404, (what, name)
    assert site.ask("/view").status == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert site.ask("/", method=method).status == 405


def test_marks_are_changed_by_a_post_with_the_token_only(site: Site, runs: Path) -> None:
    change = {"run": "ill", "tags": ["bad", "lr"], "note": "too high"}
    foreign = [{**site.cookie, "Sec-Fetch-Site": "same-site"}, {**site.cookie, "Content-Type": "text/plain"}]
    for headers, status in (
        ({}, 403),
        ({"Cookie": f"trainwright-{site.port}=wrong"}, 403),
        *((each, 405) for each in foreign),
    ):
        assert site.ask("/marks", headers=headers, body=change).status == status
    assert site.ask("/marks").status == 405 and site.ask("/view?run=ill", body=change).status == 405
    assert not (runs / "marks.json").exists()
    assert site.ask("/marks", body=change).status == 204 and marks_of(runs / "ill").tags == ["bad", "lr"]
    assert site.ask("/marks", body={"run": "ill", "panels": [{"name": "both", "metrics": ["*loss*"]}]}).status == 204
    assert site.ask("/marks", body={"columns": ["optimizer.lr"]}).status == 204
    assert "too high" in site.ask("/").text and 'data-label="optimizer.lr"' in site.ask("/runs-data").text.replace(
        "\\", ""
    )
    assert '"name":"both"' in site.ask("/view?run=ill").text
    wrong: tuple[object, ...] = (
        {"run": "../runs/ill", "tags": []},
        {"tags": []},
        {"run": "ill", "tags": ["a,b"]},
        {"path": "/"},
        [],
        "x" * 2**17,
    )
    assert [site.ask("/marks", body=each).status for each in wrong] == [422, 422, 422, 422, 422, 413]
    assert marks_of(runs / "ill").note == "too high" and marks_of(runs / "healthy").tags == []


def test_every_answer_forbids_what_a_page_does_not_need(site: Site) -> None:
    for answer in (
        site.ask("/"),
        site.ask("/view?run=ill"),
        site.ask("/data?run=ill"),
        site.ask("/no"),
        site.ask("/", headers={}),
    ):
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert (answer.headers["x-content-type-options"], answer.headers["cache-control"]) == ("nosniff", "no-store")
        assert answer.headers["referrer-policy"] == "no-referrer" and "server" not in answer.headers


def test_the_list_of_runs_says_how_each_stands(site: Site, runs: Path) -> None:
    text = site.ask("/").text
    for shown in ("healthy", "finished", "ill", "running", "optim.lr_too_high", 'href="view?run=ill"'):
        assert shown in text
    assert TOKEN not in text
    make_run(runs, "new", [started(), step(1)]).path.rename(runs / "new & <b>")
    rows = json.loads(site.ask("/runs-data").text)["rows"]
    assert "new &amp; &lt;b&gt;" in rows and "view?run=new%20%26%20%3Cb%3E" in rows


def test_a_page_asks_for_what_is_new_only(site: Site, runs: Path) -> None:
    whole = json.loads(site.ask("/data?run=ill").text)["runs"][0]
    assert (whole["id"], whole["whole"], whole["columns"]["step"]) == ("ill", True, [1, 2, 3, 4, 5])
    with (runs / "ill" / "log.jsonl").open("a") as log:
        log.write(to_json(step(6)) + "\n" + to_json(step(7))[:50])
    answer = json.loads(site.ask(f"/data?run=ill&after={whole['log']}:{whole['read']}").text)
    fresh = answer["runs"][0]
    assert not fresh["whole"] and fresh["columns"]["step"] == [6] and fresh["columns"]["samples"] == [192]
    assert set(answer["parts"]) == {"head-0", "findings-0", "records-0"}
    for odd in ("another:5", "nonsense", f"{whole['log']}:-1", ":", f"{whole['log']}:\u0663"):
        path = f"/data?run=ill&after={odd.encode().decode('latin-1')}".encode("ascii", "ignore").decode()
        assert json.loads(site.ask(path).text)["runs"][0]["whole"]
    both = json.loads(site.ask("/data?run=healthy&run=ill").text)
    assert [run["id"] for run in both["runs"]] == ["healthy", "ill"]
    some = json.loads(site.ask("/data?run=healthy&run=gone&run=ill").text)
    assert [(run["id"], run["index"]) for run in some["runs"]] == [("healthy", 0), ("ill", 2)]
    assert "head-2" in some["parts"] and "head-1" not in some["parts"]


def events_of(site: Site, path: str) -> Generator[str, None, None]:
    """The lines of a stream that are not empty."""
    link = http.client.HTTPConnection("127.0.0.1", site.port, timeout=120)
    link.request("GET", path, headers=site.cookie)
    reply = link.getresponse()
    assert reply.headers["content-type"].startswith("text/event-stream")
    try:
        while line := reply.readline():
            if line.strip():
                yield line.decode().strip()
    finally:
        link.close()


def data_of(line: str) -> dict[str, Any]:
    assert line.startswith("data: ")
    said: dict[str, Any] = json.loads(line.removeprefix("data: "))
    return said


def test_a_new_step_comes_by_itself(site: Site, runs: Path) -> None:
    stream = events_of(site, "/events?run=ill")
    assert data_of(next(stream))["runs"][0]["columns"]["step"] == [1, 2, 3, 4, 5]
    with (runs / "ill" / "log.jsonl").open("a") as log:
        log.write(to_json(step(6)) + "\n")
    news = data_of(next(stream))
    assert news["runs"][0]["columns"]["step"] == [6]
    assert list(news["parts"]) == ["head-0"], "the rest is as it was"
    with (runs / "ill" / "log.jsonl").open("a") as log:
        log.write(to_json(ended(6, "failed", "out of luck")) + "\n")
    assert "out of luck" in data_of(next(stream))["parts"]["head-0"]
    stream.close()


def test_a_stream_without_news_is_kept_alive(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "KEEP_ALIVE_S", 0.2)
    stream = events_of(site, "/events?run=healthy")
    data_of(next(stream))
    assert next(stream) == ": nothing new"
    stream.close()


def test_a_page_that_has_got_many_rows_gets_all_anew(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_NEW_ROWS", 10)
    server, seen = server_module.PageServer(RunShelf([runs])), [server_module.PageState()]

    def told(records: int) -> tuple[bool, int]:
        said: Any = server.news(["ill"], seen)
        run = said["runs"][0]
        return run["whole"], len(run["columns"]["step"])

    assert told(0) == (True, 5) and server.news(["ill"], seen) == {}
    number = 6
    for count, expected in ((4, (False, 4)), (6, (False, 6)), (1, (True, 16)), (2, (False, 2))):
        with (runs / "ill" / "log.jsonl").open("a") as log:
            log.writelines(to_json(step(number + i)) + "\n" for i in range(count))
        number += count
        assert told(count) == expected


def test_runs_of_the_same_name_and_a_run_alone(tmp_path: Path) -> None:
    for root in ("a", "b"):
        make_run(tmp_path / root, "run", [started(), step(1)])
    assert set(RunShelf([tmp_path / "a", tmp_path / "b"]).runs()) == {"run", "b.run"}
    assert RunShelf([tmp_path / "a" / "run"]).runs() == {"run": tmp_path / "a" / "run"}
    assert RunShelf([tmp_path / "nowhere"]).runs() == {}


def test_what_is_gone_is_forgotten(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", [started(), step(1)])
    shelf = RunShelf([tmp_path])
    assert list(shelf.overview().views) == ["run"]
    folder.log.unlink()
    assert shelf.overview().views == {}


def test_usage_errors(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["serve", str(tmp_path / "nowhere")]).exit_code == 2
    with open_listener(None) as taken:
        port = str(taken.getsockname()[1])
        assert CliRunner().invoke(app, ["serve", str(tmp_path), "--port", port]).exit_code == 2


@pytest.mark.process
@pytest.mark.slow
def test_a_kill_of_the_server_hurts_nothing_and_another_one_begins(runs: Path) -> None:
    for end, code in ((signal.SIGKILL, -9), (signal.SIGINT, 0)):
        process = forked.Forked(forked.COMMAND_LINE, "serve", str(runs), "--port", "0")
        while "\n" not in process.stdout:
            assert process.poll() is None, process.stderr
            time.sleep(0.02)
        url = process.stdout.splitlines()[0].split()[-1]
        port = int(url.split(":")[2].partition("/")[0])
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        link.request("GET", url.partition(str(port))[2])
        assert link.getresponse().status == 303
        add_step = to_json(step(100, at_s=BEGAN_S + 500))
        with (runs / "ill" / "log.jsonl").open("a") as log:
            log.write(add_step + "\n")
        process.send_signal(end)
        assert process.wait(timeout=120) == code
        link.close()


@pytest.mark.process
@pytest.mark.slow
def test_a_server_beside_a_training_is_a_process_of_its_own(runs: Path) -> None:
    said: list[str] = []
    serve_in_background(RunFolder(runs / "ill"), said.append)
    (line,) = said
    url = line.split()[-1]
    port = int(url.split(":")[2].partition("/")[0])
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    link.request("GET", url.partition(str(port))[2])  # it answers once the process is up: the socket listens already
    reply = link.getresponse()
    assert (reply.status, reply.headers["location"]) == (303, "view?run=ill")
    link.close()
    server = BACKGROUND_SERVERS.pop()
    server.kill()
    assert server.wait(timeout=120) == -9
    add(RunFolder(runs / "ill"), [step(6)])  # the training writes on


WRITER = """
import sys, time
from pathlib import Path
from tests.report_pages.runs import started, step
from trainwright.runs.folder import RunFolder
from trainwright.runs.lock import RunLock
from trainwright.runs.writer import LogWriter
folder = RunFolder(Path(sys.argv[1]))
lock, log = RunLock.acquire(folder.path), LogWriter(folder.log)
log.write(started())
for number in range(1, 1_000_000):
    log.write(step(number))
    time.sleep(0.01)
"""


@pytest.mark.process
@pytest.mark.slow
def test_a_kill_of_the_training_is_told_and_the_page_stays(
    site: Site, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "REFRESH_S", 0.1)
    folder = RunFolder.create(runs, "doomed")
    writer = forked.Forked(WRITER, str(folder.path))
    while not folder.log.exists() or site.ask("/view?run=doomed").status != 200:
        assert writer.poll() is None, writer.stderr
        time.sleep(0.1)
    stream = events_of(site, "/events?run=doomed")
    assert "running" in data_of(next(stream))["parts"]["head-0"]
    writer.kill()
    heads = (data_of(line)["parts"].get("head-0", "") for line in stream if line.startswith("data: "))
    assert any("none of its processes is left" in head for head in heads)
    stream.close()
    assert "killed" in site.ask("/view?run=doomed").text and "killed" in site.ask("/runs-data").text
