"""A server on this machine that speaks the part of the hub's API that ``huggingface_hub`` uses for one repository."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c" * 40


class Hub(ThreadingHTTPServer):
    """Holds the files of the repository ``user/tiny``, and the received requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.is_private: bool | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving() -> Iterator[Hub]:
    """Context in which the server answers."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def _answer(self, code: int, body: object, **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().strip(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def do_POST(self) -> None:
        body = self._body()
        self.server.requests.append(f"POST {self.path}")
        if self.headers.get("Authorization") != "Bearer hf_test":
            self._answer(401, {"error": "Invalid credentials"})
        elif self.path == "/api/repos/create":
            self.server.is_private = json.loads(body).get("visibility") == "private"
            self._answer(200, {"url": f"{self.server.address}/user/tiny"})
        elif "/preupload/" in self.path:
            files = [{"path": each["path"], "uploadMode": "regular"} for each in json.loads(body)["files"]]
            self._answer(200, {"files": [{**each, "shouldIgnore": False, "oid": None} for each in files]})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.content[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"{self.server.address}/user/tiny/commit/{COMMIT}"
            self._answer(200, {"commitUrl": url, "commitOid": COMMIT, "success": True})
        else:
            self._answer(200, {"errors": [], "warnings": []})

    def do_GET(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        content = self.server.content
        name = self.path.partition("/resolve/")[2].partition("/")[2].partition("?")[0]
        if self.path.startswith("/api/models/user/tiny/revision/"):
            names = [{"rfilename": each} for each in content]
            self._answer(200, {"id": "user/tiny", "sha": COMMIT, "siblings": names})
        elif self.path.startswith("/api/models/user/tiny/tree/"):
            sizes = {each: len(body) for each, body in content.items()}
            self._answer(200, [{"type": "file", "path": each, "size": sizes[each], "oid": each} for each in content])
        elif name in content:
            etag = hashlib.sha1(content[name]).hexdigest()
            self._answer(200, content[name], ETag=f'"{etag}"', X_Repo_Commit=COMMIT)
        else:
            self._answer(404, {"error": "not found"}, X_Error_Code="EntryNotFound")

    do_HEAD = do_GET  # noqa: N815
