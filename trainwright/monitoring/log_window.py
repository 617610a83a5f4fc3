"""Collects metrics and values of ``tw.log`` over the steps since the last record of the log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.group import SOLO, World
from trainwright.engine.metrics import MetricSet
from trainwright.engine.observer import Observer, Stop
from trainwright.engine.step import StepResult
from trainwright.engine.user_log import LoggedMeans, collecting
from trainwright.monitoring.cadence import Every


class LogWindow:
    """An observer that updates the metrics after each step. ``values`` returns those since the last call.

    ``keeper`` is for the step function; None without metrics. With several ranks, each rank must have one. Their values
    are joined when ``every`` is due, as it is for the log, which the first rank writes.
    """

    def __init__(self, metrics: MetricSet, world: World = SOLO, every: Every | None = None) -> None:
        assert (world.size > 1) == (every is not None)
        self._metrics = metrics
        self._world = world
        self._every = every
        self._logged = LoggedMeans()
        self._has_seen = False
        self._joined: dict[str, float] = {}
        self.keeper = metrics.keeper if metrics else None

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Receive the values of ``tw.log`` within the block."""
        with collecting(self._logged):
            yield

    def observe(self, result: StepResult, state: TrainState) -> None:
        if self.keeper is not None:
            self._update(result)
        if self._every is not None and (self._every.due(state) or result.step == 1):
            self._joined = self._taken()

    def _update(self, result: StepResult) -> None:
        assert self.keeper is not None
        seen, micro = self.keeper.pop(), result.batch.micro
        if len(seen) == len(micro):  # a rank without samples left repeats others, which do not count
            seen = [each for each, of in zip(seen, micro) if of.size]
        if seen and not (
            result.skipped.device.type == "cpu" and bool(result.skipped)
        ):  # outputs of a skipped step are rarely finite
            self._metrics.update(seen)
            self._has_seen = True

    def values(self) -> Mapping[str, float]:
        """Return means and metrics over the steps since the last call; with several ranks, up to the last due step."""
        joined, self._joined = self._joined, {}
        return self._taken() if self._every is None else joined

    def _taken(self) -> dict[str, float]:
        values = self._logged.pop(self._world)
        if self.keeper is not None and (self._has_seen or self._world.size > 1):
            self._has_seen = False
            values |= self._metrics.compute(self._world)
        return values

    def close(self) -> None: ...


class NotLogging:
    """Wraps an observer that replays steps, so that ``tw.log`` does nothing in them."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def observe(self, result: StepResult, state: TrainState) -> Stop | None:
        with collecting(None):
            return self._observer.observe(result, state)

    def close(self) -> None:
        with collecting(None):
            self._observer.close()
