"""What to do about a spike: warn, leave the batch out, or go back some steps and leave it out (as PaLM did by hand)."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Literal

OnSpike = Literal["warn", "skip", "rollback"]
WARM, WINDOW = 16, 64


class Spikes:
    """A gradient norm of more than ``factor`` times the median of the last 64 is a spike; not in the first 16 steps.

    Chowdhery et al. 2022 (PaLM, section 5.1) went back 100 steps and left 200-500 batches out; here it is the batches
    from the snapshot that is gone back to up to the spike, and no other. A norm that stays high is no spike: after 4
    in a row the new level is accepted.
    """

    def __init__(self, policy: OnSpike, *, factor: float = 8.0) -> None:
        self.policy, self.factor = policy, factor
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._in_a_row = self._count = 0
        self.last_median = 0.0

    def is_spike(self, norm: float) -> bool:
        """Takes the norm of a step before its update, not clipped."""
        if self.last_median and norm > self.factor * self.last_median and self._in_a_row < 4:
            self._in_a_row += 1
            return True
        self._in_a_row = 0
        self._norms.append(norm)
        self._count += 1
        if self._count % WARM == 0:  # a median costs 10 us
            self.last_median = statistics.median(self._norms)
        return False
