"""What pages cost: a report, the opening of a long log, and a server with many pages open beside a fast training.

    python -m benchmarks.pages [--quick] [--steps 1000000] [--pages 20] [--seconds 120] [--only report,opening,load]

report     seconds to read a log of 100,000 steps and to write its report, and the size of that
opening    a log of ``--steps`` steps: seconds until the server has answered with its page, and until all of it was read
load       ``--pages`` pages listen to one run, to which 50 steps a second are written: what the process of the server
           grew from a fifth of the time to the end, in MiB and in open files; the share of a core that it took; and
           the time from the writing of a step to its arrival at a page
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.figures import about, arguments, figure
from trainwright.pages.report import write_report
from trainwright.runlog.folder import RunFolder
from trainwright.runlog.records import Started, Step, to_json
from trainwright.runlog.writer import LogWriter

BENCH = "pages"
PER_S = 50


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


def make_log(root: Path, name: str, steps: int) -> RunFolder:
    folder = RunFolder.create(root, name)
    with folder.log.open("w") as log:
        log.write(to_json(Started(time_s=1.79e9, step=0, version="0", pid=1)) + "\n")
        log.writelines(to_json(step(number)) + "\n" for number in range(1, steps + 1))
    return folder


@contextmanager
def server_of(root: Path) -> Iterator[tuple[psutil.Process, int, str]]:
    """Its process, port and token."""
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


def report(root: Path, steps: int) -> None:
    folder = make_log(root, "reported", steps)
    begin_s = time.perf_counter()
    written = write_report([folder.path])
    figure(BENCH, f"report_{steps}", [time.perf_counter() - begin_s], unit="s", against="reading and writing")
    figure(BENCH, f"report_{steps}_size", [written.bytes / 2**20], unit="MiB", against="the file")


def opening(root: Path, steps: int) -> None:
    make_log(root, "long", steps)
    with server_of(root) as (_, port, token):
        ask(port, token, "/nothing").read()  # until the process is up
        begin_s = time.perf_counter()
        text = ask(port, token, "/view?run=long").read()
        figure(BENCH, f"opening_{steps}", [time.perf_counter() - begin_s], unit="s", against="the page is there")
        while b"still being read" in text:
            text = ask(port, token, "/data?run=long").read()
        figure(BENCH, f"opening_{steps}_all", [time.perf_counter() - begin_s], unit="s", against="all of it was read")


class Page(threading.Thread):
    """Listens to the events of a run, and notes how late each step is."""

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


def load(root: Path, pages: int, seconds: float) -> None:
    folder = make_log(root, "busy", 1000)
    log, written_s, number = LogWriter(folder.log), dict[int, float](), 1000
    with server_of(root) as (process, port, token):
        open_pages = [Page(port, token, written_s) for _ in range(pages)]
        for page in open_pages:
            page.start()
        begin_s, first = time.perf_counter(), None
        while (passed_s := time.perf_counter() - begin_s) < seconds:
            number += 1
            written_s[number] = time.perf_counter()
            log.write(step(number))
            if first is None and passed_s > seconds / 5:
                first = (process.memory_info().rss, process.num_fds(), sum(process.cpu_times()[:2]), passed_s)
            time.sleep(max(0.0, begin_s + (number - 1000) / PER_S - time.perf_counter()))
        assert first is not None
        rss, files, cpu_s, at_s = first
        since = "a fifth of the time"
        figure(BENCH, "load_growth", [(process.memory_info().rss - rss) / 2**20], unit="MiB", against=since)
        figure(BENCH, "load_files", [process.num_fds() - files], unit="files", against=since)
        core = (sum(process.cpu_times()[:2]) - cpu_s) / (passed_s - at_s)
        figure(BENCH, "load_core", [core], unit="share", against="one core")
        late_s = [each for page in open_pages for each in page.late_s]
        figure(BENCH, "load_late", late_s, unit="s", against="the writing of a step")
    log.close()


def main() -> None:
    options = arguments(
        __doc__, steps=(1_000_000, 2000), pages=(20, 2), seconds=(120.0, 3.0), only=("report,opening,load", "load")
    )
    about(BENCH)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if "report" in options.only:
            report(root / "a", options.steps // 10)
        if "opening" in options.only:
            opening(root / "b", options.steps)
        if "load" in options.only:
            load(root / "c", options.pages, options.seconds)


if __name__ == "__main__":
    main()
