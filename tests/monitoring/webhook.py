"""A local server that receives alerts as Slack does."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

GENEROUS_S = 60.0


class Hook(ThreadingHTTPServer):
    """Answers 500 to the first ``failures`` requests, then 200. ``taken``: the accepted alerts."""

    daemon_threads = True

    def __init__(self, failures: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.failures, self.asked, self.taken = failures, 0, list[dict[str, str]]()
        self.arrived = threading.Semaphore(0)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/services/S3CRET"

    def wait(self) -> None:
        """Waits for the next accepted alert."""
        assert self.arrived.acquire(timeout=GENEROUS_S), "no alert came"


class Handler(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked += 1
        ok = self.server.asked > self.server.failures
        self.send_response(200 if ok else 500)
        self.end_headers()
        if ok:
            self.server.taken.append(body)
            self.server.arrived.release()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Prints nothing."""
