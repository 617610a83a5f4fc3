"""Report, server and pages ask nothing of a network: they work where there is none but the loopback."""

from __future__ import annotations

import fcntl
import ipaddress
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report_pages.browser import CHROMIUM, browser_in
from tests.report_pages.runs import ended, evaluated, found, make_run, started, step
from tests.report_pages.serving import site_of
from trainwright.report.pages.report import write_report

SIOCSIFFLAGS, UP_AND_RUNNING = 0x8914, 0x41
ALONE = ("unshare", "--map-root-user", "--net")
"""A namespace of its own: with a loopback that is down, and nothing else."""


def forbid_other_addresses() -> None:
    """From now on this process may connect to the loopback only; nothing takes this back."""

    def look(event: str, details: tuple[object, ...]) -> None:
        if event == "socket.getaddrinfo" and details[0] not in ("127.0.0.1", "localhost", None):
            raise AssertionError(f"asks for the address of {details[0]}")
        if event in ("socket.connect", "socket.sendto") and isinstance(details[1], tuple):
            assert ipaddress.ip_address(details[1][0]).is_loopback, details[1]

    sys.addaudithook(look)


def look_at_pages(root: Path, *, alone: bool) -> None:
    """Runs in the other process."""
    if alone:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", UP_AND_RUNNING))
        assert [name for _, name in socket.if_nameindex()] == ["lo"]
    forbid_other_addresses()
    records = [started(), *map(step, range(1, 31)), evaluated(30, 0.5), found(at_step=20), ended(30)]
    runs = [make_run(root / "runs", name, records, settings={}).path for name in ("a", "b")]
    report, both = write_report(runs[:1]).path, write_report(runs, root / "both.html").path
    with site_of(root / "runs") as site:
        for path in ("/", "/view?run=a", "/view?run=a&run=b", "/data?run=a", "/runs-data"):
            assert site.ask(path).status == 200, path
        if CHROMIUM is not None:
            with browser_in(root / "profile") as browser:
                for url in (site.url, f"http://127.0.0.1:{site.port}/view?run=a&run=b", f"file://{both}"):
                    browser.open(url)
                browser.open(f"file://{report}")
                assert browser.value("document.querySelectorAll('.chart canvas').length") > 3
                assert browser.errors == []
                browser.open("about:blank")
    print("done")


def may_be_alone() -> bool:
    return (
        shutil.which("unshare") is not None
        and subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode == 0
    )


@pytest.mark.process
@pytest.mark.slow
def test_nothing_is_asked_of_a_network(tmp_path: Path) -> None:
    """In a namespace without one; where that is not allowed, in a process that may connect to the loopback only."""
    alone = may_be_alone()
    command = [*(ALONE if alone else ()), sys.executable, "-m", "tests.report_pages.test_no_network", str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run([*command, str(alone)], cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "done", done.stderr


if __name__ == "__main__":
    look_at_pages(Path(sys.argv[1]), alone=sys.argv[2] == "True")
