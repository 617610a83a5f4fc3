"""Limits the connections of the page server, so that another user of the machine cannot block its owner."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

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

    @property
    def _answers(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

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
        if not self._answers:  # the timer restarts at the end of an answer
            self.transport.abort()
