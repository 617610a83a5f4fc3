"""Which steps the probes hear whole: all, until the loop has been calm for a while."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.recorder.listener import Listener

CALM = 64
"""Steps without any reason to look, after which some methods of probes rest ..."""
EVERY = 16
"""... but for one step in so many: that which a look may be due for."""


class Resting:
    """Lets listeners rest in calm steps. What they hear, they hear from the end of one step to the end of the next."""

    def __init__(self, group: Sequence[Listener]) -> None:
        self._group = group
        self._disturbed_at = 0
        self.rests = False

    def judged(self, step: int, *, calm: bool) -> None:
        """``step`` was judged. Not ``calm``: bad, spiked, or urgent; then all is heard from now on."""
        if not calm:
            self._disturbed_at = step

    def prepare_next(self, step: int) -> None:
        """Must be called when ``step`` is over."""
        rests = step - self._disturbed_at >= CALM and step % EVERY != 0
        if rests != self.rests:
            self.rests = rests
            for each in self._group:
                each.is_resting = rests
