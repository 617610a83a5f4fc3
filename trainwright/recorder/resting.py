"""Which steps the probes hear whole: all, until the loop has been calm for a while."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from trainwright.recorder.listener import Listener, call_each, methods_of
from trainwright.runlog.json_values import Event

CALM = 64
"""Steps without any reason to look, after which some methods of probes rest ..."""
EVERY = 16
"""... but for one step in so many: that which a look may be due for."""
_SUSPICIOUS = operator.attrgetter("is_suspicious")


class Resting:
    """Lets listeners rest in calm steps. What they hear, they hear from the end of one step to the end of the next.

    ``events`` returns those of the step so far. ``is_calm``: there was no reason to look for a while, and nothing
    that is out of the ordinary in this step.
    """

    def __init__(self, group: Sequence[Listener], events: Callable[[], Sequence[Event]]) -> None:
        self._group, self._events = group, events
        self._on_woken = methods_of(group, "on_woken")
        self._disturbed_at = 0
        self.rests = self.is_calm = False

    def disturb(self, step: int) -> None:
        """``step`` was bad, spiked, or urgent: all is heard from now on."""
        self._disturbed_at = step

    def prepare_next(self, step: int) -> None:
        """Must be called when ``step`` is over."""
        self.is_calm = step - self._disturbed_at >= CALM and not any(map(_SUSPICIOUS, self._group))
        self._rest(self.is_calm and step % EVERY != 0)

    def rest(self) -> None:
        """Nothing but losses and updates is recorded of the next step."""
        self._rest(True)

    def wake(self) -> None:
        """What happens now is no part of an ordinary step: from here to the end of this one all is heard."""
        self.is_calm = False
        if self.rests:
            self._rest(False)
            call_each(self._on_woken, self._events())

    def _rest(self, rests: bool) -> None:
        if rests != self.rests:
            self.rests = rests
            for each in self._group:
                each.is_resting = rests
