"""A real browser for the tests of pages: Chromium, controlled by its DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--remote-debugging-pipe"),
)
WAIT_S = 60.0


class Browser:
    """One or more tabs. ``errors``: errors in the consoles. ``requests``: the requested addresses."""

    def __init__(self, to: int, from_: int) -> None:
        self._to, self._from, self._unread = to, from_, b""
        self._numbers, self.tab = itertools.count(1), ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._targets: dict[str, str] = {}
        self.new_tab()

    def new_tab(self, *, window: bool = False) -> str:
        """Opens a tab, which hides the others, or a new window. Returns its session id."""
        self.tab = ""
        target = self.call("Target.createTarget", url="about:blank", newWindow=window)["targetId"]
        self.tab = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._targets[self.tab] = target
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self.tab

    def switch_to(self, tab: str) -> None:
        """Brings a tab to the front."""
        self.tab = tab
        self.call("Page.bringToFront")

    def close(self, tab: str) -> None:
        """Closes a tab; another one must be brought to the front."""
        self.tab = ""
        self.call("Target.closeTarget", targetId=self._targets.pop(tab))

    def call(self, method: str, **params: object) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self.tab:
            message["sessionId"] = self.tab
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            part = os.read(self._from, 2**20)
            assert part, "the browser is gone"
            self._unread += part
        text, _, self._unread = self._unread.partition(b"\0")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(str(params["entry"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(str(params["args"]))

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Opens an address, and waits until the page is loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.value("window.isOld = true")
        failed = self.call("Page.navigate", url=url).get("errorText")
        assert failed is None, (url, failed)
        self.until("!window.isOld && document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        said = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    def until(self, expression: str) -> float:
        """Waits until a JavaScript expression is true. Returns the waiting time in seconds."""
        begin_s = time.monotonic()
        while not self._is_true(expression):
            assert time.monotonic() - begin_s < WAIT_S, f"never: {expression}"
            time.sleep(0.02)
        return time.monotonic() - begin_s

    def _is_true(self, expression: str) -> bool:
        try:
            return bool(self.value(expression))
        except AssertionError as error:
            if "navigated" not in str(error):  # a submitted form loads its page again
                raise
            return False

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Writes a PNG of the visible part, or with ``whole`` of the full page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        more = {"clip": clip, "captureBeyondViewport": True} if whole else {}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **more)["data"]))


@contextmanager
def browser_in(folder: Path) -> Iterator[Browser]:
    """Starts Chromium with a profile in ``folder``."""
    assert CHROMIUM is not None
    theirs_in, to = os.pipe()
    from_, theirs_out = os.pipe()
    high_in, high_out = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (theirs_in, theirs_out))

    def take_3_and_4() -> None:
        """Chromium reads its commands from descriptor 3 and writes answers to 4."""
        os.dup2(high_in, 3)
        os.dup2(high_out, 4)

    command = [CHROMIUM, *OPTIONS, f"--user-data-dir={folder}"]
    silent: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, pass_fds=(3, 4), preexec_fn=take_3_and_4, **silent)
    for fd in (theirs_in, theirs_out, high_in, high_out):
        os.close(fd)
    try:
        yield Browser(to, from_)
    finally:
        process.terminate()
        process.wait(timeout=60)
        os.close(to)
        os.close(from_)
