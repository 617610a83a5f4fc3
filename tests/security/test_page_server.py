"""Another user of the machine, who does not know the token, cannot keep the owner of a page server from it."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.report_pages.runs import make_run, started, step
from tests.report_pages.serving import TOKEN, Site, site_of
from trainwright.report.server import server

pytestmark = pytest.mark.slow  # a server for each


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    make_run(tmp_path, "run", [started(), step(1)])
    with site_of(tmp_path) as opened:
        yield opened


def connected(site: Site, sent: bytes = b"") -> socket.socket:
    link = socket.create_connection(("127.0.0.1", site.port), timeout=60)
    link.sendall(sent)
    return link


def is_closed(link: socket.socket) -> bool:
    """Waits until the server has closed a connection, for a minute at most."""
    try:
        while link.recv(4096):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    finally:
        link.close()
    return True


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET / HT",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000\r\n\r\nx",
    ],
    ids=["nothing", "half of a header", "half of a second header", "half of a body"],
)
def test_a_request_that_does_not_come_is_not_waited_for(
    site: Site, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEADER_S", 0.2)
    assert is_closed(connected(site, sent))


def test_open_connections_do_not_shut_the_owner_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_UNKNOWN", 8)
    monkeypatch.setattr(server, "HEADER_S", 600.0)
    stream = http.client.HTTPConnection("127.0.0.1", site.port, timeout=60)
    stream.request("GET", "/events?run=run", headers=site.cookie)
    reply = stream.getresponse()
    assert reply.readline().startswith(b"data: ")
    with ExitStack() as held:
        others = [held.enter_context(connected(site, b"GET / HTTP/1.1\r\n")) for _ in range(20)]
        assert site.ask("/view?run=run").status == 200
        assert all(map(is_closed, others[:12])), "the oldest go first"
        others[-1].sendall(b"Host: 127.0.0.1\r\n\r\n")
        assert b"403" in others[-1].recv(4096), "the newest are served"
    assert reply.readline() == b"\n" and not reply.closed, "the page of the owner stays open"
    stream.close()


@pytest.mark.parametrize("digits", ["9" * 5000, "9" * 16, "\u0663", "-1", "1e3"])
def test_an_odd_number_in_an_address_is_no_error(site: Site, digits: str) -> None:
    path = f"/data?run=run&after=x:{digits}".encode().decode("latin-1")
    link = connected(
        site, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: {site.cookie['Cookie']}\r\n\r\n".encode("latin-1")
    )
    status = link.recv(64).split()[1]
    link.close()
    assert status == (b"400" if not path.isascii() else b"200")


@pytest.mark.parametrize("path", ["/%E2%82%AC", "/%0d%0aX-Y:%20z", "/%ff"])
def test_an_odd_path_with_the_token_is_no_error(site: Site, path: str) -> None:
    answer = site.ask(f"{path}?token={TOKEN}", headers={})
    assert answer.status == 303 and "x-y" not in answer.headers
