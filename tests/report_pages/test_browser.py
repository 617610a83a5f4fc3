"""The pages in a real browser: drawn, without an error or a request to elsewhere, and up to date by themselves."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import trainwright as tw
from tests.report_pages.browser import CHROMIUM, Browser, browser_in
from tests.report_pages.runs import BEGAN_S, add, ended, evaluated, found, make_run, started, step
from tests.report_pages.serving import site_of
from trainwright.monitoring.media import MediaWriter
from trainwright.report.marks import marks_of
from trainwright.report.pages.report import write_report
from trainwright.runs.lock import RunLock
from trainwright.runs.media import Loggable
from trainwright.runs.records import Logged, to_json

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium"),
]

INK = """(name) => {
  const figure = [...document.querySelectorAll("figure")].find((each) => each.ariaLabel.startsWith(name));
  const canvas = figure.querySelector("canvas"), colour = document.createElement("canvas").getContext("2d");
  colour.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--c0");
  colour.fillRect(0, 0, 1, 1);
  const [r, g, b] = colour.getImageData(0, 0, 1, 1).data;
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const columns = new Set();
  for (let i = 0; i < pixels.length; i += 4)
    if (Math.abs(pixels[i] - r) + Math.abs(pixels[i + 1] - g) + Math.abs(pixels[i + 2] - b) < 24 && pixels[i + 3] > 128)
      columns.add((i / 4) % canvas.width);
  return columns.size / canvas.width;
}"""
"""The share of a chart's columns of pixels that have the colour of the first curve."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser_in(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def nothing_is_wrong(browser: Browser) -> Iterator[None]:
    browser.errors.clear()
    browser.requests.clear()
    yield
    assert browser.errors == []
    own = ("file://", "data:", "blob:", "about:", "http://127.0.0.1:")
    assert [url for url in browser.requests if not url.startswith(own)] == []


def report(root: Path) -> Path:
    """A run with a finding, an evaluation, a resume and losses that are not finite."""
    losses = dict.fromkeys(range(50, 56), math.nan)
    records = [started(), *(step(number, losses.get(number)) for number in range(1, 101)), evaluated(50, 0.7)]
    records += [started(90), *(step(number) for number in range(91, 121)), found(), ended(120)]
    return write_report([make_run(root, "run", records, settings={}).path]).path


def test_the_curves_of_a_report_are_drawn(browser: Browser, tmp_path: Path) -> None:
    path = report(tmp_path)
    for dark in (False, True):
        for width in (1280, 400):
            browser.open(f"file://{path}", width=width, dark=dark)
            for chart in ("loss", "gradient norm", "learning rate", "throughput", "waiting", "memory"):
                assert browser.value(f"({INK})({chart!r})") > 0.5, (chart, width, dark)
            assert browser.value("document.documentElement.scrollWidth <= innerWidth"), "nothing hangs over"
    assert len(browser.requests) == 4, "the file, and nothing else"


def test_a_pin_opens_its_finding(browser: Browser, tmp_path: Path) -> None:
    browser.open(f"file://{report(tmp_path)}")
    assert browser.value("[...document.querySelectorAll('.pin')].map((pin) => pin.className + pin.textContent)") == [
        "pin critical1",
        "pin resume\u21bb",
    ]
    browser.value("document.querySelector('.pin.critical').click()")
    assert browser.value("document.activeElement.id") == "finding-0-0"
    assert browser.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_the_axis_can_be_chosen_and_zoomed_by_keys(browser: Browser, tmp_path: Path) -> None:
    browser.open(f"file://{report(tmp_path)}")
    for axis in ("samples", "seconds"):
        browser.value(f"x.value = '{axis}', x.dispatchEvent(new Event('change'))")
        assert browser.value("document.querySelector('figure').ariaLabel").startswith(f"loss over {axis}; loss from ")
        assert browser.value(f"({INK})('loss')") > 0.5
    browser.value("document.querySelector('figure').focus()")
    key = {"type": "keyDown", "text": "+", "key": "+"}
    before = browser.value("document.querySelector('figure canvas').toDataURL()")
    browser.call("Input.dispatchKeyEvent", **key)
    browser.until(f"document.querySelector('figure canvas').toDataURL() !== {before!r}")
    browser.value("document.getElementById('whole').click()")
    browser.until(f"document.querySelector('figure canvas').toDataURL() === {before!r}")


def test_a_new_step_and_a_finding_appear(browser: Browser, tmp_path: Path) -> None:  # benchmarks/pages.py times it
    folder = make_run(tmp_path, "run", [started(), *map(step, range(1, 31))])
    with site_of(tmp_path) as site:
        browser.open(f"{site.url}")
        browser.until("!!document.querySelector('tbody a')")
        browser.open(f"http://127.0.0.1:{site.port}/view?run=run")
        browser.until("document.getElementById('link').textContent === 'live'")
        assert "No findings" in browser.value("document.body.innerText") and not browser.value(
            "!!document.querySelector('.pin')"
        )
        with folder.log.open("a") as log:
            log.write(to_json(step(31)) + "\n" + to_json(found(at_step=31)) + "\n")
        is_shown = "document.querySelector('.facts dd').textContent === '31'"
        browser.until(f"{is_shown} && !!document.querySelector('.pin.critical')")
        browser.value("document.querySelector('.pin').click()")
        assert browser.value("document.activeElement.id") == "finding-0-0"
        browser.open(f"http://127.0.0.1:{site.port}/view?run=run&poll")
        with folder.log.open("a") as log:
            log.write(to_json(step(40)) + "\n")
        browser.until("document.querySelector('.facts dd').textContent === '40'")
        browser.open("about:blank")


LIVE = "document.getElementById('link').textContent === 'live'"


def test_many_tabs_of_one_browser(browser: Browser, tmp_path: Path) -> None:
    """A browser keeps six connections to a server: those that wait for news in hidden tabs must not take them all."""
    folder = make_run(tmp_path, "run", [started(), *map(step, range(1, 31))])
    first, tabs = browser.tab, list[str]()
    with site_of(tmp_path) as site:
        browser.open(site.url)
        for _ in range(7):
            tabs.append(browser.new_tab())
            browser.open(f"http://127.0.0.1:{site.port}/view?run=run")
            browser.until(LIVE)
        with folder.log.open("a") as log:
            log.write(to_json(step(31)) + "\n")
        for tab in (tabs[-1], tabs[0]):  # one that was listening, and one that was hidden when it came
            browser.switch_to(tab)
            browser.until("document.querySelector('.facts dd').textContent === '31'")
        for tab in tabs:
            browser.close(tab)
        browser.switch_to(first)
        browser.open("about:blank")


def test_many_windows_that_are_all_seen(browser: Browser, tmp_path: Path) -> None:
    """Four of them listen, and leave connections to the others, which ask."""
    folder = make_run(tmp_path, "run", [started(), *map(step, range(1, 31))])
    first, windows = browser.tab, list[str]()
    with site_of(tmp_path) as site:
        browser.open(site.url)
        browser.open("about:blank")
        for _ in range(5):
            windows.append(browser.new_tab(window=True))
            browser.open(f"http://127.0.0.1:{site.port}/view?run=run")
            browser.until(LIVE)
        with folder.log.open("a") as log:
            log.write(to_json(step(31)) + "\n")
        for number, window in enumerate(windows):
            browser.tab = window
            assert not browser.value("document.hidden")
            browser.until("document.querySelector('.facts dd').textContent === '31'")
            held = browser.value("navigator.locks.query().then((all) => all.held.length)")
            assert held == 4, number
        browser.close(windows.pop(0))  # its seat is taken by another one
        browser.tab = windows[-1]
        browser.until("navigator.locks.query().then((all) => all.held.length === 4)")
        for window in windows:
            browser.close(window)
        browser.tab = first


def test_runs_are_chosen_and_compared(browser: Browser, tmp_path: Path) -> None:
    for lr in (0.001, 0.5):
        records = [started(), *(step(n, 1 / n + lr) for n in range(1, 31)), evaluated(30, lr), ended(30)]
        make_run(tmp_path, f"lr-{lr}", records, settings={"optimizer.lr": lr})
    make_run(tmp_path, "another", [started(), step(1)])
    with site_of(tmp_path) as site:
        browser.open(site.url)
        browser.until("document.querySelectorAll('tbody tr').length === 3")
        browser.value("filter.value = 'lr- finished', filter.dispatchEvent(new Event('input'))")
        assert browser.value("[...document.querySelectorAll('tbody tr')].filter((row) => !row.hidden).length") == 2
        browser.value(
            "[...document.querySelectorAll('thead .sort')].find((each) => each.textContent === 'run').click()"
        )
        names = "[...document.querySelectorAll('tbody tr')].map((row) => row.dataset.name)"
        assert browser.value(names) == ["another", "lr-0.001", "lr-0.5"]
        browser.value("document.querySelectorAll('tbody tr:not([hidden]) input').forEach((each) => each.click())")
        browser.value("document.getElementById('compare').click()")
        browser.until("!!document.getElementById('comparison')")
        cells = (
            "[...document.querySelectorAll('.differences tbody tr')].map((row) => row.innerText.split('\\t').join(' '))"
        )
        assert "optimizer.lr 0.001 0.5" in browser.value(cells)
        assert browser.value(f"({INK})('loss')") > 0.5
        browser.open("about:blank")


def test_tags_panels_and_columns_are_chosen_on_the_page(browser: Browser, tmp_path: Path) -> None:
    records = [started(), *map(step, range(1, 31)), evaluated(20, 0.5), evaluated(30, 0.4), ended(30)]
    make_run(tmp_path, "run", records, settings={"optimizer.lr": 0.25})
    send = "{0}.elements.{1}.value = {2!r}, {0}.requestSubmit()"
    with site_of(tmp_path) as site:
        browser.open(site.url)
        browser.value(send.format("document.getElementById('add-columns')", "columns", "optimizer.lr, none"))
        browser.until("[...document.querySelectorAll('th')].some((each) => each.textContent === 'optimizer.lr')")
        assert browser.value("document.querySelector('td[data-label=\"optimizer.lr\"]').textContent") == "0.25"
        browser.open(f"http://127.0.0.1:{site.port}/view?run=run")
        browser.value(send.format("document.querySelector('.marks form')", "tags", " good one, <b>, "))
        browser.until("document.querySelector('#head-0').textContent.includes('good one')")
        browser.value(
            send.format("document.querySelector('#panels-form form')", "panels", "both: loss, *accuracy\nlr: learning*")
        )
        browser.until("document.querySelectorAll('#panels figure').length === 2")
        assert browser.value("document.querySelector('#panels figure').ariaLabel").count(" from ") == 2
        browser.value(send.format("document.querySelector('.marks form')", "tags", "x" * 81))
        browser.until("document.querySelector('.marks [role=status]').textContent.includes('tags.0')")
        browser.open("about:blank")
        browser.errors.clear()  # of the answer 422
    assert marks_of(tmp_path / "run").tags == ["good one", "<b>"]
    browser.open(f"file://{write_report([tmp_path / 'run']).path}")
    assert browser.value("document.querySelectorAll('#panels figure').length") == 2
    assert browser.value("document.querySelectorAll('form, .marks').length") == 0


def test_text_of_a_run_is_no_script(browser: Browser, tmp_path: Path) -> None:
    evil = "<script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">"
    folder = make_run(tmp_path, "run", [started(), step(1), found("a.b", text=evil), found(evil)], settings={})
    folder.recipe.write_text(f"# {evil}\n")
    browser.open(f"file://{write_report([folder.path]).path}")
    assert browser.value("document.title") == "run - Trainwright"
    assert evil in browser.value("document.body.textContent")


CONTROLS = "a[href], button:not(:disabled), input, select, textarea, summary, .chart"
FAINT = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (let up = element; up; up = up.parentElement) {
      const found = rgba(getComputedStyle(up).backgroundColor);
      if (found[3] === 255) return found;
    }
    return [255, 255, 255];
  };
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), faint = new Set();
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement;
    if (!walk.currentNode.textContent.trim() || !element.checkVisibility()) continue;
    const [a, b] = [light(rgba(getComputedStyle(element).color)), light(ground(element))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const text = walk.currentNode.textContent.trim().slice(0, 20);
    if (contrast < 4.5) faint.add(`${contrast.toFixed(2)} ${element.tagName}.${element.className} ${text}`);
  }
  return [...faint];
}"""
"""The texts that are seen with a contrast of less than 4.5 to 1 (WCAG 2.2, 1.4.3)."""


def key(browser: Browser, name: str, code: int) -> None:
    for kind in ("rawKeyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code)


def reached(browser: Browser) -> set[int]:
    """Goes through the page by the Tab key; the numbers of the controls that had the focus, each with a mark on it."""
    browser.value(f"controls = () => [...document.querySelectorAll('{CONTROLS}')].filter((e) => e.checkVisibility())")
    browser.value("document.activeElement.blur()")
    found: set[int] = set()
    for _ in range(browser.value("controls().length") + 10):
        key(browser, "Tab", 9)
        at = browser.value("controls().indexOf(document.activeElement)")
        if at in found:
            break
        if at >= 0:
            found.add(at)
            look = "getComputedStyle(document.activeElement)"
            assert browser.value(f"{look}.outlineStyle !== 'none' && parseFloat({look}.outlineWidth) >= 1"), at
    return found


def test_a_page_can_be_used_by_keys_and_be_read(browser: Browser, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    path = report(runs)
    make_run(runs, "other", [started(), *map(step, range(1, 31)), ended(30, "failed", "out of luck")], settings={})
    both = write_report([path.parent, runs / "other"], tmp_path / "both.html").path
    with site_of(runs) as site:
        browser.open(site.url)
        live = (f"http://127.0.0.1:{site.port}/", f"http://127.0.0.1:{site.port}/view?run=run")
        for url in (*live, f"file://{path}", f"file://{both}"):
            for dark in (False, True):
                browser.open(url, dark=dark)
                assert browser.value(f"({FAINT})()") == [], (url, dark)
            assert reached(browser) == set(range(browser.value("controls().length"))), url
        browser.open("about:blank")
    browser.open(f"file://{path}")
    browser.value("document.querySelector('h1').style.color = '#888'")
    assert len(browser.value(f"({FAINT})()")) == 1, "what is faint is found"
    browser.value("document.querySelector('details summary').focus()")
    key(browser, " ", 32)
    assert browser.value("document.activeElement.parentElement.open")


def test_nothing_moves_where_that_is_not_wanted(browser: Browser, tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", [started(), step(1)])
    lock = RunLock.acquire(folder.path)  # else it was killed, and only a run that goes on moves
    path = write_report([folder.path]).path
    lock.release(clean=True)
    state = "getComputedStyle(document.querySelector('.state'), '::before').animationName"
    for wanted, moves in (("no-preference", True), ("reduce", False)):
        browser.open(f"file://{path}")
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": wanted}])
        assert (browser.value(state) != "none") == moves
        assert (browser.value("document.getAnimations().length") > 0) == moves


def test_runs_are_taken_out_of_the_curves_and_put_back(browser: Browser, tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_run(tmp_path, name, [started(), *(step(n, 1 / n + (name == "b")) for n in range(1, 31))])
    browser.open(f"file://{write_report([tmp_path / 'a', tmp_path / 'b'], tmp_path / 'both.html').path}")
    legend = "document.querySelectorAll('#legend button')"
    for share, pressed in ((0.0, "false"), (0.5, "true")):
        browser.value(f"{legend}[0].click()")
        assert browser.value(f"{legend}[0].ariaPressed") == pressed
        assert (browser.value(f"({INK})('loss')") > 0.5) == (share > 0)


def test_a_live_chart_keeps_its_place_while_steps_come(browser: Browser, tmp_path: Path) -> None:
    """Focus, zoom and what is open stay, so that who reads by keys or by a screen reader is not thrown out."""
    folder = make_run(tmp_path, "run", [started(), *map(step, range(1, 101)), found()])
    with site_of(tmp_path) as site:
        browser.open(site.url)
        browser.open(f"http://127.0.0.1:{site.port}/view?run=run")
        browser.until("document.getElementById('link').textContent === 'live'")
        browser.value("window.first = document.querySelector('figure'), first.focus()")
        key(browser, "+", 187)
        browser.value("document.querySelector('.finding details').open = true")
        with folder.log.open("a") as log:
            log.write(to_json(step(101)) + "\n")
        browser.until("document.querySelector('.facts dd').textContent === '101'")
        assert browser.value("document.activeElement === first && document.querySelector('.finding details').open")
        assert not browser.value("document.getElementById('whole').disabled"), "it is zoomed in yet"
        browser.open("about:blank")


def test_layers_are_a_map_of_colours(browser: Browser, tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", [started(), *map(step, range(1, 101))])
    names = [f"blocks.{number}" for number in range(6)]
    with folder.log.open("a") as log:
        for at in range(1, 101, 3):
            norms = ["NaN" if (at, n) == (52, 2) else 10.0**-n for n in range(6)]
            record = {"kind": "layers", "step": at, "layers": names if at == 1 else [], "grad_norm": norms}
            log.write(json.dumps(record, separators=(",", ":")) + "\n")
    path = write_report([folder.path]).path
    for dark in (False, True):
        browser.open(f"file://{path}", dark=dark)
        colours = """(() => {
          const canvas = document.querySelector("#layers canvas"), ctx = canvas.getContext("2d"), found = {};
          const wrong = getComputedStyle(document.documentElement).getPropertyValue("--critical").trim();
          const pixels = ctx.getImageData(0, 0, canvas.width, canvas.height).data;
          for (let i = 0; i < pixels.length; i += 4) {
            const colour = "#" + [0, 1, 2].map((c) => pixels[i + c].toString(16).padStart(2, "0")).join("");
            found[colour] = (found[colour] || 0) + 1;
          }
          return [found["#440154"] || 0, found["#fde724"] || found["#fde725"] || 0, found[wrong] || 0];
        })()"""
        least, greatest, wrong = browser.value(colours)
        assert least > 1000 and greatest > 1000 and 0 < wrong < least / 5, (least, greatest, wrong)
    browser.value("document.querySelector('#layers .chart').focus()")
    key(browser, "ArrowRight", 39)
    assert "blocks." in browser.value("document.querySelector('#layers figcaption').textContent")


@pytest.mark.parametrize("is_watched", [False, True], ids=["metrics", "watch.log"])
def test_figures_are_drawn(browser: Browser, tmp_path: Path, is_watched: bool) -> None:
    steps = [replace(step(number), probed={} if is_watched else {"f1": number / 100}) for number in range(1, 101)]
    logged = [Logged(time_s=BEGAN_S + at, step=at, figures={"f1": at / 100}) for at in range(1, 101, 9)]
    folder = make_run(tmp_path, "run", [started(), *steps, *(logged if is_watched else [])])
    browser.open(f"file://{write_report([folder.path]).path}")
    assert browser.value("document.querySelector('#metrics-section h2').checkVisibility()")
    assert browser.value(f"({INK})('f1')") > 0.5


def test_logged_images_text_and_histograms_follow_the_slider(browser: Browser, tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", [started(), *(step(number) for number in range(1, 31))])
    evil = "<img src=x onerror=alert(1)>"

    def log_at(number: int) -> None:
        values: dict[str, Loggable] = {
            "drawn": tw.Image(np.full((2, 3), number / 100), caption=f"caption {number}"),
            evil: f"{evil} {number}",
            "counted": tw.Histogram(np.arange(number + 1.0), bins=4),
        }
        MediaWriter(folder.path, lambda record: add(folder, [record]), [], pytest.fail).write(number, values)

    for number in (10, 20):
        log_at(number)
    text = "document.querySelector('.logged.text pre').textContent"
    image = "document.querySelector('.logged.image img')"
    sliders = "document.querySelectorAll('.logged input')"
    first = f"{sliders}.forEach((each) => {{ each.value = 0; each.dispatchEvent(new Event('input')); }})"
    with site_of(tmp_path) as site:
        browser.open(site.url)
        live = f"http://127.0.0.1:{site.port}/view?run=run"
        for address in (live, f"file://{write_report([folder.path]).path}"):
            browser.open(address)
            browser.until("document.querySelectorAll('.logged pre, .logged img, .logged svg').length === 3")
            browser.until(f"{image}.naturalWidth === 3")
            assert browser.value(text) == f"{evil} 20"
            bars = browser.value("document.querySelector('.logged .bars svg').ariaLabel")
            assert bars.startswith("histogram of 21 values")
            browser.value(first)
            browser.until(f"{text} === {json.dumps(f'{evil} 10')}")
            browser.until(f"{image}.alt === 'drawn, caption 10'")
            assert browser.value("document.querySelectorAll('img[src=x]').length") == 0
        browser.open(live)
        browser.until(f"{text} === {json.dumps(f'{evil} 20')}")
        log_at(30)
        browser.until(f"{text} === {json.dumps(f'{evil} 30')}")
        browser.value(first)
        browser.until(f"{text} === {json.dumps(f'{evil} 10')}")
        log_at(40)
        browser.until("document.querySelector('.logged input').max === '3'")
        assert browser.value("document.querySelector('.logged.text input').value") == "0", "it stays where it was put"
        assert browser.value(text) == f"{evil} 10"
        browser.open("about:blank")
