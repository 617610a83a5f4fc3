"""The application behind ``trainwright serve``: pages of runs, and updates as runs write them.

    /            all runs                       /runs-data  /runs-events   the rows of that page
    /view?run=   one run, or several            /data       /events        updates of them
    /media       an image, a text or a histogram that the user logged
    /marks       a POST changes tags, notes, panels or columns (``report.marks``); runs are only read

Every address is relative, so it works behind ``ssh -L`` and a proxy under any path. A request names one of the
runs that were found; no path is ever built from a request. Connections are limited, so that another user
of the machine cannot block its owner.
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
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from pydantic import ConfigDict, ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from trainwright.errors import StorageError
from trainwright.report.marks import ColumnNames, Note, Panels, Tags, mark_run, read_marks, write_marks
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
from trainwright.runs.files import UnreadableFile, reason_of
from trainwright.runs.json_values import JsonValue
from trainwright.runs.media import HISTOGRAM, IMAGE, read_media
from trainwright.runs.records import Media
from trainwright.runs.secrets import masked
from trainwright.runs.shapes import FileShape

HEADER_S = 5.0
"""The time that a connection may take for a complete request, or stay idle after one."""
MAX_UNKNOWN = 64
"""The maximum of open connections that have not shown the token. One more closes the oldest of them."""
KNOWS_TOKEN = "trainwright.knows_token"
"""The application sets this key in the ``state`` of a request that has shown the token."""


class LimitedConnection(H11Protocol):
    """A connection that is closed when its request does not come, or when too many are open."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._has_shown_token = False
        self._waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._opened_s = self.loop.time()
        self._wait_for_request()
        others = [each for each in self.connections if isinstance(each, LimitedConnection) and not each.is_known]
        for each in sorted(others, key=lambda each: each._opened_s)[: max(0, len(others) - MAX_UNKNOWN)]:
            each.transport.abort()

    @property
    def is_known(self) -> bool:
        """True if any request of this connection has shown the token."""
        if self.scope is not None and self.scope["state"].get(KNOWS_TOKEN):
            self._has_shown_token = True
        return self._has_shown_token

    def on_response_complete(self) -> None:
        self._has_shown_token = self.is_known  # the next request has a scope of its own
        super().on_response_complete()
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_request(self) -> None:
        self._stop_waiting()
        if not self.transport.is_closing():
            self._waiting = self.loop.call_later(HEADER_S, self._expire)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _expire(self) -> None:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if not is_answering:  # the timer restarts at the end of an answer
            self.transport.abort()


T = TypeVar("T")
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
POLL_S, KEEP_ALIVE_S = 0.5, 15.0
READ_BUDGET_S = 0.5
"""The time for reading a log before an answer is sent; a longer log is read on while its page is shown."""
REFRESH_S = 3.0
"""The interval at which a page is refreshed without new records: a killed run changes its state without one."""
LAYERS_INTERVAL_S = 5.0
"""The interval at which new statistics by layer are sent."""
MAX_RUNS_PER_PAGE = 24
"""The maximum number of runs side by side on one page."""
MAX_BODY_BYTES = 2**16
MAX_NEW_ROWS = 4000
"""Rows that a page receives one by one before it receives all of them again, thinned."""


class MarksChange(FileShape):
    """The body of a POST: each given field is changed, for ``run``, its folder, or without ``run`` all folders."""

    model_config = ConfigDict(extra="forbid")
    run: str = ""
    tags: Tags | None = None
    note: Note | None = None
    panels: Panels | None = None
    columns: ColumnNames | None = None


@dataclass
class PageState:
    """The state of one run on one page: its log, numbers of rows and readings, parts (HTML), and the last refresh."""

    log: str = ""
    read: int = 0
    rows: int = 0
    complete: bool = False
    readings: int = -1
    media: int = -1
    layers: int = 0
    layers_s: float = -math.inf
    parts: dict[str, str] = field(default_factory=dict)
    position: tuple[str, int] = ("", -1)
    refreshed_s: float = -math.inf


class PageServer:
    """Answers requests. One thread reads, and one reader of each log serves all pages that show it."""

    def __init__(self, shelf: RunShelf) -> None:
        self._shelf, self._reading = shelf, ThreadPoolExecutor(1, "reader")

    async def _read(self, act: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._reading, act)

    def app(self, token: str, *, hosts: Sequence[str] = (), cookie: str = "trainwright") -> Guard:
        """Return the application. ``hosts`` are allowed host names besides those of the loopback."""
        routes = [
            Route("/", self._overview),
            Route("/view", self._view),
            Route("/data", self._data),
            Route("/events", self._events),
            Route("/media", self._media),
            Route("/runs-data", self._runs_data),
            Route("/runs-events", self._runs_events),
            Route("/marks", self._change_marks, methods=["POST"]),
        ]
        return Guard(Starlette(routes=routes), token, (*LOOPBACK, *hosts), cookie)

    async def _overview(self, _request: Request) -> Response:
        return HTMLResponse(await self._read(lambda: overview_page(self._shelf.overview())))

    async def _view(self, request: Request) -> Response:
        names = request.query_params.getlist("run")
        try:
            text = await self._read(lambda: self._page(names))
        except Exception as error:
            return HTMLResponse(unreadable_part(reason_of(error)), 422)
        return HTMLResponse(text) if text else _not_found(names)

    def _page(self, names: Sequence[str]) -> str:
        views = self._views(names, READ_BUDGET_S)
        return runs_page(list(views.values()), names=list(views), live=True) if views else ""

    async def _data(self, request: Request) -> Response:
        names, seen = _parse_query(request.query_params)
        message = await self._read(lambda: self.news(names, seen))
        return JSONResponse(message) if message else _not_found(names)

    async def _media(self, request: Request) -> Response:
        return await self._read(lambda: self._media_of(request.query_params))

    def _media_of(self, query: QueryParams) -> Response:
        run, name, type_, step = (query.get(each, "") for each in ("run", "name", "type", "step"))
        view = self._views([run], 0.0).get(run)
        is_step = re.fullmatch("[0-9]{1,15}", step)
        record = view.log.media.find(name, type_, int(step)) if view is not None and is_step else None
        if view is None or record is None:
            return PlainTextResponse("there is no such image or text", 404)
        return _content(view, record)

    async def _events(self, request: Request) -> Response:
        names, seen = _parse_query(request.query_params)
        if not await self._read(lambda: any(name in self._shelf.runs() for name in names)):
            return _not_found(names)
        return self._stream(lambda: self.news(names, seen), is_behind=lambda: not all(each.complete for each in seen))

    async def _change_marks(self, request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                return PlainTextResponse(f"more than {MAX_BODY_BYTES:,} bytes", 413)
        try:
            change = MarksChange.model_validate_json(body)
            await self._read(lambda: self._apply(change))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            return PlainTextResponse(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", 422)
        except (LookupError, StorageError) as error:
            return PlainTextResponse(str(error), 422)
        return Response(status_code=204)

    def _apply(self, change: MarksChange) -> None:
        paths = self._shelf.runs()
        is_of_run = change.tags is not None or change.note is not None
        if (change.run or is_of_run) and change.run not in paths:
            raise LookupError(f"there is no run {change.run} here")
        if is_of_run:
            mark_run(paths[change.run], tags=change.tags, note=change.note)
        chosen = {"panels": change.panels, "columns": change.columns}
        if update := {name: value for name, value in chosen.items() if value is not None}:
            for folder in {paths[change.run].parent} if change.run else self._shelf.parents():
                write_marks(folder, read_marks(folder).model_copy(update=update))

    async def _runs_data(self, _request: Request) -> Response:
        return JSONResponse({"rows": await self._read(self._rows)})

    async def _runs_events(self, _request: Request) -> Response:
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

    def _stream(
        self,
        news: Callable[[], Mapping[str, JsonValue]],
        *,
        every_s: float = POLL_S,
        is_behind: Callable[[], bool] = lambda: False,
    ) -> Response:
        """Return server-sent events: non-empty results of ``news``, or a comment after a long silence.

        They are ``every_s`` seconds apart, and follow at once if a log ``is_behind``, not yet read to its end.
        """

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
                await asyncio.sleep(0.0 if is_behind() else every_s)

        headers = {"X-Accel-Buffering": "no"}  # nginx would buffer events
        return StreamingResponse(events(), media_type="text/event-stream", headers=headers)

    def _views(self, names: Sequence[str], for_s: float) -> dict[str, RunView]:
        """Return the views of existing runs, each log read on for its part of ``for_s`` seconds."""
        paths = self._shelf.runs()
        known = [name for name in dict.fromkeys(names) if name in paths][:MAX_RUNS_PER_PAGE]
        return {name: self._shelf.view(paths[name], for_s=for_s / len(known)) for name in known}

    def news(self, names: Sequence[str], seen: Sequence[PageState]) -> dict[str, JsonValue]:
        """Return updates of these runs for a page, and record them in ``seen``; empty if there are none."""
        views = self._views(names, READ_BUDGET_S)
        there = [(i, name, views[name], seen[i]) for i, name in enumerate(names) if name in views]
        wrote = any(view.log.position != known.position for _, _, view, known in there)
        if not wrote and all(time.monotonic() - known.refreshed_s < REFRESH_S for _, _, _, known in there):
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
            known.parts = now
            known.position = view.log.position
            known.refreshed_s = time.monotonic()
        return {"runs": runs, "parts": parts} if wrote or parts else {}


def _content(view: RunView, record: Media) -> Response:
    """Return the content of a file; its type is that of the checked content, and nothing in it is executed."""
    try:
        file = read_media(view.folder.path, record)
    except UnreadableFile as error:
        return PlainTextResponse(error.reason, 422)
    if file.type == IMAGE:
        return Response(file.content, media_type="image/png")
    return JSONResponse(file.histogram) if file.type == HISTOGRAM else PlainTextResponse(str(masked(file.text)))


def _curves(view: RunView, known: PageState) -> dict[str, JsonValue]:
    """Return the new rows; if the page has none, or there are many new ones, all rows, thinned."""
    log = view.log
    fresh = log.read_rows - known.read
    is_full = known.log != log.name or not (known.complete and log.is_complete) or known.rows + fresh > MAX_NEW_ROWS
    curves = curves_of(view) if is_full else curves_of(view, after=known.read)
    known.rows = 0 if is_full else known.rows + fresh
    known.log = log.name
    known.read = log.read_rows
    known.complete = log.is_complete
    readings = readings_of(view) if is_full or known.readings != log.readings.count else None
    known.readings = log.readings.count
    media = log.media.to_json() if is_full or known.media != log.media.count else None
    known.media = log.media.count
    layers = _layers(view, known, is_full=is_full)
    return {**curves, "whole": is_full, "readings": readings, "layers": layers, "media": media}


def _layers(view: RunView, known: PageState, *, is_full: bool) -> JsonValue:
    """Return the maps by layer if they are new. A busy run has new ones each second, and they are large."""
    count, now_s = view.log.layers.count + view.log.output_grads.count, time.monotonic()
    if not is_full and (count == known.layers or now_s - known.layers_s < LAYERS_INTERVAL_S):
        return None
    known.layers, known.layers_s = count, now_s
    return view.log.heat_maps


def _parse_query(query: QueryParams) -> tuple[list[str], list[PageState]]:
    """Return the runs of a request, and the state of its page: ``after=LOG:ROWS`` for each."""
    names = query.getlist("run")[:MAX_RUNS_PER_PAGE]
    after = [*query.getlist("after"), *[""] * len(names)]
    seen = []
    for text in after[: len(names)]:
        log, _, rows = text.partition(":")
        seen.append(PageState(log, int(rows), 0, True) if re.fullmatch("[0-9]{1,15}", rows) else PageState())
    return names, seen


def _not_found(names: Sequence[str]) -> Response:
    return PlainTextResponse(
        f"there is no run {', '.join(names) or 'without a name'} here: see the list of all runs", 404
    )


_NO_TOKEN = PlainTextResponse("open the address that `trainwright serve` has printed: it ends with a token", 403)


class Guard:
    """Accepts requests with an allowed host name and the token.

    A page of another site cannot make a browser request the runs: it does not have the token, the browser does not send
    the cookie from there, and a foreign host name that resolves to this machine is not allowed. ``used_s`` is the time
    of the last answer to a request with the token, by ``time.monotonic``.
    """

    def __init__(self, app: ASGIApp, token: str, hosts: Sequence[str], cookie: str) -> None:
        self._app = app
        self._token = token
        self._hosts = frozenset(hosts)
        self._cookie = cookie
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
            return PlainTextResponse(
                "not an allowed host name: start the server with --host-name NAME to allow it", 400
            )
        if scope["method"] not in ("GET", "HEAD"):
            return self._refusal_of_change(scope, headers)
        if self._knows(query.get("token", "")):
            scope["state"][KNOWS_TOKEN] = True
            return self._with_cookie(scope, query)
        if self._knows(_cookie_of(headers, self._cookie)):
            scope["state"][KNOWS_TOKEN] = True
            return None
        return _NO_TOKEN

    def _refusal_of_change(self, scope: Scope, headers: Headers) -> ASGIApp | None:
        """Refuse a change without the token, and one that a page of another site or port could make a browser send."""
        is_json = headers.get("content-type", "").partition(";")[0] == "application/json"
        if scope["method"] != "POST" or not is_json or headers.get("sec-fetch-site", "same-origin") != "same-origin":
            return PlainTextResponse("this server reads runs; tags and the like are changed by a POST of JSON", 405)
        if not self._knows(_cookie_of(headers, self._cookie)):
            return _NO_TOKEN
        scope["state"][KNOWS_TOKEN] = True
        return None

    def _knows(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self._token.encode())

    def _with_cookie(self, scope: Scope, query: QueryParams) -> Response:
        """Return a redirect to the address without the token, so that no screenshot and no copied link shows it."""
        rest = urlencode([(key, value) for key, value in query.multi_items() if key != "token"])
        here = quote(scope["path"].rpartition("/")[2]) or "./"
        cookie = f"{self._cookie}={self._token}; HttpOnly; SameSite=Lax"  # for this path, also behind a proxy
        return Response(status_code=303, headers={"location": f"{here}?{rest}" if rest else here, "set-cookie": cookie})


_HEADERS = (
    (b"content-security-policy", f"{content_policy(live=True)}; frame-ancestors 'self'".encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).lower()


def _cookie_of(headers: Headers, name: str) -> str:
    try:
        cookies = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return ""
    return cookies[name].value if name in cookies else ""
