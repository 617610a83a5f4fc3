"""The cost of pages: a report, a long log, scrolling in a browser, and a server with many open pages.

    python -m benchmarks.pages [--quick] [--steps 1000000] [--pages 20] [--seconds 600] [--records 720000]
                               [--layers 60] [--tabs 20] [--only report,opening,browser,load,tabs]

report     seconds to read a log of a tenth of ``--steps`` steps with statistics of ``--layers`` layers and to write its
           report; size of the report
opening    a log of ``--steps`` steps with these layers, with one step in ten (the default) and with every step: its
           size; seconds until the server returns the page, and until it has read the full log; CPU time of the server
browser    the report in Chromium: seconds until it is drawn, and the longest time between two frames while it is
           scrolled from end to end, and while it is zoomed in and out
load       ``--pages`` pages follow one run, to which ``--records`` steps are written within ``--seconds``, with the
           time stamps of 50 steps per second (720,000 steps are four hours): growth of the server in MiB and open
           files, from a fifth of the time to the end; its CPU time as a fraction of one core; the time from the writing
           of a step to its arrival at a page
tabs       the same for ``--tabs`` tabs of one Chromium that show the run. Each comes to the front for half a second in
           turn, while 50 steps per second are written. ``tabs_behind``: the time until a tab that comes to the front
           shows the newest step written before
"""

from __future__ import annotations

import http.client
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.figures import about, arguments, figure
from tests.report_pages.browser import CHROMIUM, browser_in
from trainwright.report.pages.report import write_report
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import Started, Step, to_json
from trainwright.runs.writer import LogWriter

BENCH = "pages"
LOOKED_AT = 10
"""Each step whose number is a multiple of this is timed on its way to the pages."""


def step(number: int) -> Step:
    noise = (number * 2654435761 % 2**32) / 2**32
    return Step(
        time_s=1.79e9 + 0.02 * number,
        step=number,
        loss=1.0 + noise,
        grad_norm=0.1 + noise,
        lr=1e-3,
        weight=1024.0,
        samples=8 * number,
        tokens=1024 * number,
        step_s=0.02 + noise / 100,
        wait_s=noise / 1000,
        skipped=0,
        mem_bytes=2**30,
        ids_hash="96a90a0c5c623e06",
    )


def layers_line(number: int, layers: int, *, named: bool) -> str:
    """Returns a record of layer statistics as long as in a real run: four digits, and a histogram of 20 bins."""
    norms = [float(f"{(1 + (number * 31 + each * 17) % 97 / 97) * 10 ** (-each / 20):.4g}") for each in range(layers)]
    record = {
        "kind": "layers",
        "time_s": 1.79e9 + 0.02 * number,
        "step": number,
        "layers": [f"blocks.{each}" for each in range(layers)] if named else [],
        **dict.fromkeys(("grad_norm", "update_ratio", "act_mean", "act_std", "act_max"), norms),
        "act_log2": [[12, *range(20)]] * layers,
    }
    return json.dumps(record, separators=(",", ":")) + "\n"


def make_log(root: Path, name: str, steps: int, layers: int = 0, *, every: int = 1) -> RunFolder:
    """Writes a log with one step in ``every``, and layer records with the intervals of a real run.

    The interval is 25 steps, or a thousandth of the steps so far if that is more.
    """
    folder, due = RunFolder.create(root, name), 1
    with folder.log.open("w") as log:
        log.write(to_json(Started(time_s=1.79e9, step=0, version="0", pid=1)) + "\n")
        for number in range(1, steps + 1):
            if number % every == 0:
                log.write(to_json(step(number)) + "\n")
            if layers and number == due:
                log.write(layers_line(number, layers, named=number == 1))
                due += max(25, number // 1000)
    return folder


@contextmanager
def server_of(root: Path) -> Iterator[tuple[psutil.Process, int, str]]:
    """Context with a running server. Yields its process, port and token."""
    command = [sys.executable, "-m", "trainwright", "serve", str(root), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        port, token = url.split(":")[2].partition("/")[0], url.partition("token=")[2]
        try:
            yield psutil.Process(process.pid), int(port), token
        finally:
            process.terminate()


def ask(port: int, token: str, path: str) -> http.client.HTTPResponse:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    link.request("GET", path, headers={"Cookie": f"trainwright-{port}={token}"})
    return link.getresponse()


def report(root: Path, steps: int, layers: int) -> Path:
    folder = make_log(root, "reported", steps, layers)
    begin_s = time.perf_counter()
    written = write_report([folder.path])
    figure(BENCH, f"report_{steps}", [time.perf_counter() - begin_s], unit="s", against="reading and writing")
    figure(BENCH, f"report_{steps}_size", [written.bytes / 2**20], unit="MiB", against="the file")
    return written.path


def opening(root: Path, steps: int, layers: int) -> None:
    for every in (10, 1):
        folder = make_log(root, f"long-{every}", steps, layers, every=every)
        against = "a step in ten, the default" if every > 1 else "every step"
        figure(BENCH, f"log_{steps}_size_{every}", [folder.log.stat().st_size / 1e6], unit="MB", against=against)
    for every in (10, 1):
        with server_of(root) as (process, port, token):
            ask(port, token, "/nothing").read()  # until the process is up
            begin_s, begin_cpu_s = time.perf_counter(), sum(process.cpu_times()[:2])
            text = ask(port, token, f"/view?run=long-{every}").read()
            case = f"opening_{steps}_{every}"
            figure(BENCH, case, [time.perf_counter() - begin_s], unit="s", against="the page is there")
            while b"still being read" in text:
                text = ask(port, token, f"/data?run=long-{every}").read()
            figure(BENCH, f"{case}_all", [time.perf_counter() - begin_s], unit="s", against="all of it was read")
            cpu_s = sum(process.cpu_times()[:2]) - begin_cpu_s
            figure(BENCH, f"{case}_cpu", [cpu_s], unit="s", against="processor time of the server for all of it")


FRAMES = """(act, for_ms) => new Promise((done) => {
  const begin = performance.now();
  let last = begin, longest = 0;
  const frame = (now) => {
    longest = Math.max(longest, now - last);
    last = now;
    if (now - begin > for_ms) return done(longest);
    act((now - begin) / for_ms);
    requestAnimationFrame(frame);
  };
  requestAnimationFrame((now) => { last = now; frame(now); });
})"""
SCROLL = "(share) => scrollTo(0, share * (document.documentElement.scrollHeight - innerHeight))"
ZOOM = """(share) => {
  const chart = document.querySelector(".chart"), key = Math.floor(share * 20) % 10 < 5 ? "+" : "-";
  chart.focus({ preventScroll: true });
  chart.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
}"""


def browser(path: Path, profile: Path) -> None:
    """Measures frames of a headless browser, which renders on the CPU."""
    with browser_in(profile) as shown:
        opened: list[float] = []
        for _ in range(5):
            shown.open(f"file://{path}")
            timing = "performance.getEntriesByType('navigation')[0].loadEventEnd"
            shown.until(f"{timing} > 0 && !!document.querySelector('.chart canvas')")
            opened.append(shown.value(timing) / 1000)
        figure(BENCH, "browser_open", opened, unit="s", against="the start of the navigation")
        for name, act in (("scroll", SCROLL), ("zoom", ZOOM)):
            longest = [shown.value(f"({FRAMES})({act}, 2000)") for _ in range(5)]
            figure(BENCH, f"browser_{name}", longest, unit="ms", against="the longest frame of two seconds")
        assert shown.errors == []


class Page(threading.Thread):
    """Receives the events of a run. ``late_s``: the time from the writing of a step to its arrival."""

    def __init__(self, port: int, token: str, written_s: dict[int, float]) -> None:
        super().__init__(daemon=True)
        self._reply, self._written_s = ask(port, token, "/events?run=busy"), written_s
        self.late_s: list[float] = []

    def run(self) -> None:
        while line := self._reply.readline():
            now_s = time.perf_counter()
            if line.startswith(b"data: ") and not (run := json.loads(line[6:])["runs"][0])["whole"]:
                steps = run["columns"].get("step", [])
                self.late_s += [now_s - self._written_s[each] for each in steps if each in self._written_s]


def look_at(process: psutil.Process) -> tuple[float, int, float, float]:
    """Returns memory, open files (minimum over 0.2 s), CPU time, and the time of the sample."""
    files = []
    for _ in range(20):
        files.append(process.num_fds())
        time.sleep(0.01)
    return process.memory_info().rss, min(files), sum(process.cpu_times()[:2]), time.perf_counter()


def show_growth(case: str, looks: Sequence[tuple[float, int, float, float]]) -> None:
    """Print the growth of the server since the first sample, and its CPU time as a fraction of one core."""
    (rss, files, cpu_s, at_s), later = looks[0], looks[1:]
    since = "a fifth of the time; at each further one"
    figure(BENCH, f"{case}_growth", [(each[0] - rss) / 2**20 for each in later], unit="MiB", against=since)
    figure(BENCH, f"{case}_files", [each[1] - files for each in later], unit="files", against=since)
    core = (later[-1][2] - cpu_s) / (later[-1][3] - at_s)
    figure(BENCH, f"{case}_core", [core], unit="share", against="one core")


def load(root: Path, pages: int, seconds: float, records: int) -> None:
    folder = make_log(root, "busy", 1000)
    log, written_s, number = LogWriter(folder.log), dict[int, float](), 1000
    per_s = records / seconds
    with server_of(root) as (process, port, token):
        open_pages = [Page(port, token, written_s) for _ in range(pages)]
        for page in open_pages:
            page.start()
        begin_s, looks = time.perf_counter(), list[tuple[float, int, float, float]]()
        while number < 1000 + records:
            passed_s = time.perf_counter() - begin_s
            for _ in range(min(int(passed_s * per_s) + 1001, 1000 + records) - number):
                number += 1
                if number % LOOKED_AT == 0:
                    written_s[number] = time.perf_counter()
                log.write(step(number))
            if passed_s > (len(looks) + 1) * seconds / 5:
                looks.append(look_at(process))
            time.sleep(0.01)
        looks.append(look_at(process))
        wrote = number - 1000
        figure(BENCH, "load_records", [wrote], unit="records", against=f"{pages} pages, {passed_s:.0f} s")
        show_growth("load", looks)
        late_s = [each for page in open_pages for each in page.late_s]
        figure(BENCH, "load_late", late_s, unit="s", against="the writing of a step")
    log.close()


STEP_SHOWN = "Number(document.querySelector('.facts dd').textContent.replace(/[^0-9]/g, ''))"


def tabs(root: Path, count: int, seconds: float) -> None:
    folder = make_log(root, "busy", 1000)
    done, number, behind_s = threading.Event(), [1000], list[float]()

    def write() -> None:
        log = LogWriter(folder.log)
        while not done.wait(0.02):
            number[0] += 1
            log.write(step(number[0]))
        log.close()

    with server_of(root) as (process, port, token), browser_in(root / "profile") as shown:
        threading.Thread(target=write, daemon=True).start()
        names = [shown.tab, *(shown.new_tab() for _ in range(count - 1))]
        for name in names:
            shown.switch_to(name)
            shown.open(f"http://127.0.0.1:{port}/view?run=busy&token={token}")
        begin_s, looks = time.perf_counter(), list[tuple[float, int, float, float]]()
        for name in itertools.cycle(names):
            passed_s = time.perf_counter() - begin_s
            if passed_s >= seconds:
                break
            if passed_s > (len(looks) + 1) * seconds / 5:
                looks.append(look_at(process))
            before = number[0]
            shown.switch_to(name)
            behind_s.append(shown.until(f"{STEP_SHOWN} >= {before}"))
            time.sleep(0.5)
        looks.append(look_at(process))
        done.set()
        assert shown.errors == []
    figure(BENCH, "tabs_open", [count], unit="tabs", against=f"{number[0] - 1000} records, {passed_s:.0f} s")
    show_growth("tabs", looks)
    figure(BENCH, "tabs_behind", behind_s, unit="s", against="when a tab comes to the front")


def main() -> None:
    options = arguments(
        __doc__,
        steps=(1_000_000, 2000),
        pages=(20, 2),
        seconds=(600.0, 3.0),
        records=(720_000, 150),
        tabs=(20, 2),
        layers=(60, 3),
        only=("report,opening,browser,load,tabs", "load"),
    )
    about(BENCH)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if "report" in options.only or "browser" in options.only:
            path = report(root / "a", options.steps // 10, options.layers)
            if "browser" in options.only and CHROMIUM is not None:
                browser(path, root / "profile")
        if "opening" in options.only:
            opening(root / "b", options.steps, options.layers)
        if "load" in options.only:
            load(root / "c", options.pages, options.seconds, options.records)
        if "tabs" in options.only and CHROMIUM is not None:
            tabs(root / "d", options.tabs, options.seconds)


if __name__ == "__main__":
    main()
