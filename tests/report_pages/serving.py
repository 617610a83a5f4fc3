"""A server of pages in a thread of the test, and requests to it over a real socket."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trainwright.report.server.serve import address, make_server, open_listener

TOKEN = "the-token"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    text: str


@dataclass(frozen=True)
class Site:
    """The address of the server. ``url`` contains the token."""

    port: int
    url: str

    def ask(
        self, path: str, *, headers: Mapping[str, str] | None = None, method: str = "GET", body: object = None
    ) -> Answer:
        """Sends a request with the cookie, or with ``headers`` instead. A request with a ``body`` is a POST of JSON."""
        if body is not None:
            method, headers = (
                "POST",
                {"Content-Type": "application/json", **(self.cookie if headers is None else headers)},
            )
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        text = None if body is None else json.dumps(body)
        link.request(method, path, text, headers=self.cookie if headers is None else dict(headers))
        reply = link.getresponse()
        answer = Answer(
            reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read().decode()
        )
        link.close()
        return answer

    @property
    def cookie(self) -> dict[str, str]:
        return {"Cookie": f"trainwright-{self.port}={TOKEN}"}


@contextmanager
def site_of(*folders: Path) -> Iterator[Site]:
    with open_listener(0) as listener:
        server, _ = make_server(folders, listener, TOKEN)
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
        thread.start()
        yield Site(listener.getsockname()[1], address(listener, TOKEN))
        server.should_exit = True
        thread.join(timeout=60)
        assert not thread.is_alive()
