"""Images, texts and histograms of the user on pages: the index, the served files, and what a report contains."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest

import trainwright as tw
from tests.report_pages.runs import BEGAN_S, add, ended, make_run, started, step
from tests.report_pages.serving import Answer, Site, site_of
from trainwright.monitoring.media import MediaWriter
from trainwright.report.pages import media
from trainwright.report.pages.report import write_report
from trainwright.report.pages.view import RunView
from trainwright.runs.folder import RunFolder
from trainwright.runs.media import Loggable
from trainwright.runs.records import Media, Record

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


def values_at(number: int) -> dict[str, Loggable]:
    image = tw.Image(np.full((4, 4), number / 100), caption=f"caption {number}")
    return {"drawn": image, "said": f"text {number}", "counted": tw.Histogram(np.arange(number + 1.0), bins=2)}


def log_to(folder: RunFolder, steps: Sequence[int], **values: Loggable) -> None:
    def write(record: Record) -> None:
        add(folder, [record])

    writer = MediaWriter(folder.path, write, [], lambda problem: pytest.fail(problem))
    for each in steps:
        writer.write(each, values or values_at(each))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = make_run(tmp_path / "runs", "run", [started(), *(step(each) for each in range(1, 31))])
    log_to(folder, (10, 20, 30))
    return folder


def index_of(folder: RunFolder) -> dict[str, Any]:
    return {each["name"]: each for each in RunView.read(folder.path).log.media.to_json()}  # type: ignore[call-overload, index, misc]


def data_in(page: str) -> Any:
    found = re.search(r'<script[^>]*id="data"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def ask(site: Site, name: str, type_: str, number: object, run: str = "run") -> Answer:
    return site.ask("/media?" + urlencode({"run": run, "name": name, "type": type_, "step": number}))


def test_the_index_has_each_name_with_its_steps(run: RunFolder) -> None:
    index = index_of(run)
    assert {name: each["type"] for name, each in index.items()} == {
        "counted": "histogram",
        "drawn": "image",
        "said": "text",
    }
    assert index["drawn"]["steps"] == [10, 20, 30] and index["drawn"]["captions"][1] == "caption 20"


def test_a_resume_drops_what_it_went_back_over(run: RunFolder) -> None:
    add(run, [started(15)])
    assert index_of(run)["said"]["steps"] == [10]
    log_to(run, (25,))
    assert index_of(run)["said"]["steps"] == [10, 25]


def test_the_server_sends_each_file_as_what_it_is(run: RunFolder) -> None:
    with site_of(run.path.parent) as site:
        page = data_in(site.ask("/view?run=run").text)
        assert [each["name"] for each in page["runs"][0]["media"]] == ["counted", "drawn", "said"]
        assert "contents" not in page["runs"][0]["media"][0]
        text, counts = ask(site, "said", "text", 20), ask(site, "counted", "histogram", 20)
        assert (text.status, text.text) == (200, "text 20")
        assert json.loads(counts.text) == {"edges": [0, 10, 20], "counts": [10, 11], "not_finite": 0}
        for answer in (text, counts):
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "default-src 'none'" in answer.headers["content-security-policy"]
        link = http.client.HTTPConnection("127.0.0.1", site.port, timeout=60)
        link.request("GET", "/media?run=run&name=drawn&type=image&step=20", headers=site.cookie)
        image = link.getresponse()
        assert image.headers["content-type"] == "image/png" and image.read()[:4] == b"\x89PNG"
        link.request("GET", "/media?run=run&name=drawn&type=image&step=20")
        assert link.getresponse().status == 403, "not without the token"
        link.close()


@pytest.mark.parametrize(
    "query",
    [
        ("said", "text", 11),
        ("said", "image", 20),
        ("..", "text", 20),
        ("said", "text", "x"),
        ("said", "text", "9" * 99),
    ],
)
def test_what_was_not_logged_is_not_found(query: tuple[str, str, object], run: RunFolder) -> None:
    with site_of(run.path.parent) as site:
        assert ask(site, *query).status == 404
        assert ask(site, *query, run="other").status == 404


def test_a_live_page_gets_new_ones_once(run: RunFolder) -> None:
    with site_of(run.path.parent) as site:
        first = json.loads(site.ask("/data?run=run").text)["runs"][0]
        assert first["media"][2]["steps"] == [10, 20, 30]
        log_to(run, (40,))
        after = json.loads(site.ask(f"/data?run=run&after={first['log']}:{first['read']}").text)["runs"][0]
        assert after["media"][2]["steps"] == [10, 20, 30, 40]


def test_a_report_contains_a_few_steps_and_says_how_many_there_are(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media, "EMBEDDED_STEPS", 3)
    log_to(run, range(40, 100))
    said = data_in(write_report([run.path]).path.read_text())["runs"][0]["media"][2]
    assert said["total"] == 63 and len(said["steps"]) == 3 and (said["steps"][0], said["steps"][-1]) == (10, 99)
    assert said["contents"][0] == "text 10" and said["contents"][-1] == "text 99"


def test_a_report_is_bounded(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = 200_000
    monkeypatch.setattr(media, "EMBEDDED_BYTES", bound)
    noise = np.random.default_rng(0).random((150, 150))
    before = write_report([run.path]).bytes
    log_to(run, range(1, 13), noise=tw.Image(noise))
    kept = data_in((write_report([run.path])).path.read_text())["runs"][0]["media"]
    noises = next(each for each in kept if each["name"] == "noise")
    assert 0 < len(noises["steps"]) < 12 and noises["steps"][-1] == 12, "the newest"
    assert write_report([run.path]).bytes < before + bound + 20_000


def test_hostile_texts_are_inert(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs", "run", [started(), step(1), ended(1)])
    values: dict[str, Loggable] = {EVIL: EVIL, "drawn": tw.Image(np.zeros((2, 2)), caption=EVIL)}
    log_to(folder, (1,), **values)
    page = write_report([folder.path]).path.read_text()
    assert "<script>alert" not in page and "<img src=x" not in page
    texts = [each for each in data_in(page)["runs"][0]["media"] if each["type"] == "text"]
    assert texts[0]["contents"] == [EVIL], "shown as text"
    with site_of(folder.path.parent) as site:
        answer = ask(site, EVIL, "text", 1)
        assert answer.text == EVIL and answer.headers["content-type"].startswith("text/plain")


def test_a_forged_record_shows_a_reason_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "secret.txt").write_text("a secret")
    names = ("../../secret.txt", "media/x/step-00000001.txt", "media/../log.txt")
    forged = [Media(time_s=BEGAN_S, step=1, name=each, file=each) for each in names]
    folder = make_run(tmp_path / "runs", "run", [started(), step(1), *forged])
    (folder.path / "media" / "x").mkdir(parents=True)
    (folder.path / "media" / "x" / "step-00000001.txt").symlink_to(tmp_path / "secret.txt")
    found = data_in(write_report([folder.path]).path.read_text())["runs"][0]["media"]
    assert all("problem" in each["contents"][0] for each in found) and len(found) == 3
    assert "a secret" not in json.dumps(found)
    with site_of(folder.path.parent) as site:
        assert [ask(site, each, "text", 1).status for each in names] == [422, 422, 422]


def test_many_names_and_steps_are_held_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "MAX_SERIES", 3)
    monkeypatch.setattr(media, "MAX_STEPS", 8)
    seen = media.LoggedMedia()
    for number in range(50):
        seen.take(Media(time_s=0.0, step=number, name="a", file="media/a/step-00000001.txt"))
        seen.take(Media(time_s=0.0, step=1, name=f"name {number}", file="media/a/step-00000001.txt"))
    names: Any = seen.to_json()
    assert len(names) == 3
    assert len(names[0]["steps"]) <= 8 and names[0]["steps"][0] == 0 and names[0]["steps"][-4:] == [46, 47, 48, 49]
