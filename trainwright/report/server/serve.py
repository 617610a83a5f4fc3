"""Runs the page server of ``trainwright serve``, alone or as a process beside a training run."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from trainwright.errors import UsageError
from trainwright.runs.folder import RunFolder

if TYPE_CHECKING:
    from uvicorn import Server

    from trainwright.report.server.server import Guard

PORT = 8787
"""The default port, for a stable address; if it is not free, another one is used."""
LINGER_S = 60.0
"""A server beside a finished run ends when no page was open for this long."""
_TOKEN, _PARENT = "TRAINWRIGHT_PAGE_TOKEN", "TRAINWRIGHT_PAGE_PARENT"
"""Passed in the environment, because other users can read a command line, but not the environment."""

BACKGROUND_SERVERS: list[subprocess.Popen[bytes]] = []
"""Servers started by this process. They are referenced because Python warns of an unreferenced running process."""


def open_listener(port: int | None) -> socket.socket:
    """Return a loopback socket that listens at ``port``; by default at PORT, or at a free port if that is taken.

    Raises UsageError if ``port`` is taken.
    """
    for each in (PORT, 0) if port is None else (port,):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", each))
        except (OSError, OverflowError) as error:
            listener.close()
            if each == port:
                raise UsageError(
                    f"port {port} cannot be used: {error}", remedy="leave --port out, or choose another"
                ) from None
        else:
            listener.listen(128)
            return listener
    raise AssertionError("unreachable: any free port is none that is taken")


def address(listener: socket.socket, token: str, *, run: str | None = None) -> str:
    """Return the URL of all runs, or of one run."""
    port = listener.getsockname()[1]
    query = urlencode({"token": token} if run is None else {"run": run, "token": token})
    return f"http://127.0.0.1:{port}/{'' if run is None else 'view'}?{query}"


def serve(folders: Sequence[Path], port: int | None, hosts: Sequence[str], say: Callable[[str], None]) -> None:
    """Serve the runs in these folders until interrupted. Raises UsageError for what is not a folder."""
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder", remedy="name the folder of the runs, such as runs, or a run")
    with open_listener(port) as listener:
        token = secrets.token_urlsafe(24)
        say(f"runs in {', '.join(map(str, folders))}: {address(listener, token)}")
        port = listener.getsockname()[1]
        say(f"for a browser on this machine; on another one: ssh -L {port}:127.0.0.1:{port} HOST. Ctrl-C ends it.")
        run_server(folders, listener, token, hosts)


def run_server(
    folders: Sequence[Path],
    listener: socket.socket,
    token: str,
    hosts: Sequence[str] = (),
    *,
    parent: int | None = None,
) -> None:
    """Serve until a signal comes, or until ``parent`` is gone and no page is open."""
    server, guard = make_server(folders, listener, token, hosts)

    def end_with_parent() -> None:
        while os.getppid() == parent or time.monotonic() - guard.used_s < LINGER_S:
            time.sleep(1.0)
        server.should_exit = True

    if parent is not None:
        threading.Thread(target=end_with_parent, daemon=True).start()
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listener])


def make_server(
    folders: Sequence[Path], listener: socket.socket, token: str, hosts: Sequence[str] = ()
) -> tuple[Server, Guard]:
    """Return the server for ``listener``, and the guard that examines each request first."""
    import uvicorn

    from trainwright.report.pages.overview import RunShelf
    from trainwright.report.server.server import LimitedConnection, PageServer

    cookie = f"trainwright-{listener.getsockname()[1]}"
    guard = PageServer(RunShelf(folders)).app(token, hosts=hosts, cookie=cookie)
    config = uvicorn.Config(
        guard,
        http=LimitedConnection,
        log_level="critical",
        access_log=False,
        lifespan="off",
        ws="none",
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config), guard


def serve_in_background(folder: RunFolder, say: Callable[[str], None]) -> None:
    """Start a server of the runs around ``folder`` as a separate process, and print the page of that run.

    The server only reads the runs, so killing either process does not affect the other. It ends some time after this
    one. Errors are printed, and training goes on.
    """
    token = secrets.token_urlsafe(24)
    try:
        with open_listener(None) as listener:
            command = [sys.executable, "-m", "trainwright.report.server.serve", str(folder.path.resolve().parent)]
            process = subprocess.Popen(
                [*command, str(listener.fileno())],
                pass_fds=[listener.fileno()],
                env={**os.environ, _TOKEN: token, _PARENT: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is meant for the training
            )
            BACKGROUND_SERVERS.append(process)
            say(f"page        {address(listener, token, run=folder.path.resolve().name)}")
    except OSError as error:
        say(f"no page: {error} (start `trainwright serve {folder.path.parent}` by hand)")


def main() -> None:
    """Run the process that ``serve_in_background`` starts. Its arguments are a folder and a listening descriptor."""
    folder, descriptor = sys.argv[1:]
    with socket.socket(fileno=int(descriptor)) as listener:
        run_server([Path(folder)], listener, os.environ[_TOKEN], parent=int(os.environ[_PARENT]))


if __name__ == "__main__":
    main()
