"""The application behind ``trainwright serve``: pages of runs, read only, and what is new of them as it is written.

    /            all runs                       /runs-data  /runs-events   the rows of that page
    /view?run=   one run, or several            /data       /events        what is new of them

Every address is relative, so it works behind ``ssh -L`` and a proxy under any path. A run is asked for by its name on
the list of those that were found: no path is ever made of what a request says.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import TypeVar
from urllib.parse import quote, urlencode

from starlette.applications import Starlette
from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainwright.report.pages.connections import KNOWS_TOKEN
from trainwright.report.pages.curves import curves_of, readings_of
from trainwright.report.pages.overview import RunShelf
from trainwright.report.pages.render import (
    content_policy,
    overview_page,
    overview_rows,
    parts_of,
    runs_page,
    unreadable_part,
)
from trainwright.report.pages.view import RunView
from trainwright.runs.files import reason_of
from trainwright.runs.json_values import JsonValue

T = TypeVar("T")
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
POLL_S, KEEP_ALIVE_S = 0.5, 15.0
READ_S = 0.5
"""What may be spent on reading a log before an answer goes out: a longer one is read on while its page is shown."""
LOOK_AGAIN_S = 3.0
"""So often a page is looked at where no record came: the state of a run changes without one when it is killed."""
LAYERS_S = 5.0
"""So often new statistics by layer go out."""
MOST_RUNS = 24
"""Side by side on one page."""
MOST_ROWS = 4000
"""Rows that a page gets one by one before it gets all of them anew, thinned."""


@dataclass
class Seen:
    """What one page knows of one run: of which log how many rows and readings, its parts, and when it was looked at."""

    log: str = ""
    read: int = 0
    rows: int = 0
    complete: bool = False
    readings: int = -1
    layers: int = 0
    layers_s: float = -math.inf
    parts: dict[str, str] = field(default_factory=dict)
    position: tuple[str, int] = ("", -1)
    looked_s: float = -math.inf


class PageServer:
    """Answers the requests. One thread reads, and one reader of each log serves all pages that show it."""

    def __init__(self, shelf: RunShelf) -> None:
        self._shelf, self._reading = shelf, ThreadPoolExecutor(1, "reader")

    async def _read(self, act: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._reading, act)

    def app(self, token: str, *, hosts: Sequence[str] = (), cookie: str = "trainwright") -> Guard:
        """``hosts`` are the names that a request may call this machine by, besides those of the loopback."""
        routes = [
            Route("/", self._overview),
            Route("/view", self._view),
            Route("/data", self._data),
            Route("/events", self._events),
            Route("/runs-data", self._runs_data),
            Route("/runs-events", self._runs_events),
        ]
        return Guard(Starlette(routes=routes), token, (*LOOPBACK, *hosts), cookie)

    async def _overview(self, request: Request) -> Response:
        return HTMLResponse(await self._read(lambda: overview_page(self._shelf.overview())))

    async def _view(self, request: Request) -> Response:
        names = request.query_params.getlist("run")
        try:
            text = await self._read(lambda: self._page(names))
        except Exception as error:
            return HTMLResponse(unreadable_part(reason_of(error)), 422)
        return HTMLResponse(text) if text else _not_found(names)

    def _page(self, names: Sequence[str]) -> str:
        views = self._views(names, READ_S)
        return runs_page(list(views.values()), names=list(views), live=True) if views else ""

    async def _data(self, request: Request) -> Response:
        names, seen = _asked(request.query_params)
        message = await self._read(lambda: self.news(names, seen))
        return JSONResponse(message) if message else _not_found(names)

    async def _events(self, request: Request) -> Response:
        names, seen = _asked(request.query_params)
        if not await self._read(lambda: self._has(names)):
            return _not_found(names)
        return self._stream(lambda: self.news(names, seen))

    async def _runs_data(self, request: Request) -> Response:
        return JSONResponse({"rows": await self._read(self._rows)})

    async def _runs_events(self, request: Request) -> Response:
        shown = ""

        def news() -> Mapping[str, JsonValue]:
            nonlocal shown
            rows = self._rows()
            if rows == shown:
                return {}
            shown = rows
            return {"rows": rows}

        return self._stream(news, every_s=2 * POLL_S)

    def _rows(self) -> str:
        return overview_rows(self._shelf.overview())

    def _stream(self, news: Callable[[], Mapping[str, JsonValue]], *, every_s: float = POLL_S) -> Response:
        """Server-sent events: what ``news`` returns, where it is anything; a comment where nothing came for long."""

        async def events() -> AsyncIterator[str]:
            sent_s = time.monotonic()
            while True:
                message = await self._read(news)
                if message:
                    yield f"data: {json.dumps(message, allow_nan=False)}\n\n"
                    sent_s = time.monotonic()
                elif time.monotonic() - sent_s > KEEP_ALIVE_S:
                    yield ": nothing new\n\n"
                    sent_s = time.monotonic()
                await asyncio.sleep(every_s)

        headers = {"X-Accel-Buffering": "no"}  # nginx would keep events back
        return StreamingResponse(events(), media_type="text/event-stream", headers=headers)

    def _has(self, names: Sequence[str]) -> bool:
        return any(name in self._shelf.runs() for name in names)

    def _views(self, names: Sequence[str], for_s: float) -> dict[str, RunView]:
        """Those of these runs that there are, read on for that long."""
        paths = self._shelf.runs()
        known = [name for name in dict.fromkeys(names) if name in paths][:MOST_RUNS]
        return {name: self._shelf.view(paths[name], for_s=for_s / len(known)) for name in known}

    def news(self, names: Sequence[str], seen: Sequence[Seen]) -> dict[str, JsonValue]:
        """What a page does not know yet of these runs; notes in ``seen`` that it does from now on. Empty: nothing."""
        views = self._views(names, READ_S)
        there = [(i, name, views[name], seen[i]) for i, name in enumerate(names) if name in views]
        wrote = any(view.log.position != known.position for _, _, view, known in there)
        if not wrote and all(time.monotonic() - known.looked_s < LOOK_AGAIN_S for _, _, _, known in there):
            return {}
        runs: list[JsonValue] = []
        parts: dict[str, JsonValue] = {}
        for index, name, view, known in there:
            try:
                runs.append({**_curves(view, known), "id": name, "index": index})
                now = parts_of(view, index)
            except Exception as error:
                now = {f"head-{index}": str(unreadable_part(reason_of(error)))}
            parts |= {part: text for part, text in now.items() if known.parts.get(part) != text}
            known.parts, known.position, known.looked_s = now, view.log.position, time.monotonic()
        return {"runs": runs, "parts": parts} if wrote or parts else {}


def _curves(view: RunView, known: Seen) -> dict[str, JsonValue]:
    """The rows that are new, or all, thinned: for a page that has none, and where they are many."""
    log = view.log
    fresh = log.read_rows - known.read
    whole = known.log != log.name or not (known.complete and log.is_complete) or known.rows + fresh > MOST_ROWS
    curves = curves_of(view) if whole else curves_of(view, after=known.read)
    known.rows = 0 if whole else known.rows + fresh
    known.log, known.read, known.complete = log.name, log.read_rows, log.is_complete
    readings = readings_of(view) if whole or known.readings != log.readings.count else None
    known.readings = log.readings.count
    return {**curves, "whole": whole, "readings": readings, "layers": _layers(view, known, whole=whole)}


def _layers(view: RunView, known: Seen, *, whole: bool) -> JsonValue:
    """The maps by layer where they are new; a busy run has some each second, and they are large."""
    count, now_s = view.log.layers.count + view.log.output_grads.count, time.monotonic()
    if not whole and (count == known.layers or now_s - known.layers_s < LAYERS_S):
        return None
    known.layers, known.layers_s = count, now_s
    return view.log.heat_maps


def _asked(query: QueryParams) -> tuple[list[str], list[Seen]]:
    """The runs of a request, and what it says that its page knows: ``after=LOG:ROWS`` for each."""
    names = query.getlist("run")[:MOST_RUNS]
    after = [*query.getlist("after"), *[""] * len(names)]
    seen = []
    for text in after[: len(names)]:
        log, _, rows = text.partition(":")
        seen.append(Seen(log, int(rows), 0, True) if re.fullmatch("[0-9]{1,15}", rows) else Seen())
    return names, seen


def _not_found(names: Sequence[str]) -> Response:
    return PlainTextResponse(f"there is no run {', '.join(names) or 'of no name'} here: see the list of all runs", 404)


class Guard:
    """Lets requests through that name this machine by a name of its own, and know the token.

    A page of another site cannot make a browser ask for the runs: it does not know the token, the cookie that holds it
    is not sent from there, and a name of its own that leads here is no name of this machine. ``used_s`` is when a
    request that knew the token was last answered, by ``time.monotonic``.
    """

    def __init__(self, app: ASGIApp, token: str, hosts: Sequence[str], cookie: str) -> None:
        self._app, self._token, self._hosts, self._cookie = app, token, frozenset(hosts), cookie
        self.used_s = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if scope["state"].get(KNOWS_TOKEN):
                self.used_s = time.monotonic()
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        await (self._refusal(scope) or self._app)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        headers, query = Headers(scope=scope), QueryParams(scope["query_string"])
        if _without_port(headers.get("host", "")) not in self._hosts:
            return PlainTextResponse("not a name of this server: start it with --host-name NAME to allow it", 400)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("there is nothing to write here", 405)
        if self._knows(query.get("token", "")):
            scope["state"][KNOWS_TOKEN] = True
            return self._with_cookie(scope, query)
        if self._knows(_cookie_of(headers, self._cookie)):
            scope["state"][KNOWS_TOKEN] = True
            return None
        return PlainTextResponse("open the address that `trainwright serve` has printed: it ends with a token", 403)

    def _knows(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self._token.encode())

    def _with_cookie(self, scope: Scope, query: QueryParams) -> Response:
        """The same page without the token in its address, where a screenshot or a copied link would show it."""
        rest = urlencode([(key, value) for key, value in query.multi_items() if key != "token"])
        here = quote(scope["path"].rpartition("/")[2]) or "./"
        cookie = f"{self._cookie}={self._token}; HttpOnly; SameSite=Lax"  # for this path, whatever a proxy makes of it
        return Response(status_code=303, headers={"location": f"{here}?{rest}" if rest else here, "set-cookie": cookie})


def _headers() -> list[tuple[bytes, bytes]]:
    named = {
        "content-security-policy": f"{content_policy(live=True)}; frame-ancestors 'self'",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-store",
    }
    return [(name.encode(), value.encode()) for name, value in named.items()]


_HEADERS = _headers()


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).lower()


def _cookie_of(headers: Headers, name: str) -> str:
    try:
        cookies = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return ""
    return cookies[name].value if name in cookies else ""
