"""Evaluation and saving between two steps. The state is complete there, so an error loses no step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.evaluate import EvaluationResult
from trainwright.errors import OutOfMemoryError


class Periodic(Protocol):
    """An action that runs when it is due, such as evaluation or saving."""

    def due(self, state: TrainState) -> bool: ...
    def __call__(self, state: TrainState) -> None: ...


class Evaluator(Periodic, Protocol):
    """Evaluates during a run and once at its end. A step that was evaluated already is not evaluated again."""

    @property
    def last(self) -> EvaluationResult | None: ...
    def finish(self, state: TrainState) -> None: ...


class Saver(Periodic, Protocol):
    """Saves the state. A step that was saved already is not saved again. On exit all saves have reached the disk.

    ``rescue`` saves after an exception, if one rank can do that alone.
    """

    def rescue(self, state: TrainState) -> None: ...
    def __exit__(self, *error: object) -> None: ...


class _Never:
    last: EvaluationResult | None = None

    def due(self, state: TrainState) -> bool:
        return False

    def __call__(self, state: TrainState) -> None: ...
    def finish(self, state: TrainState) -> None: ...
    def rescue(self, state: TrainState) -> None: ...
    def __exit__(self, *error: object) -> None: ...


NEVER = _Never()


class SaveOnError:
    """Saves the state when an exception leaves the context. Does not save on KeyboardInterrupt, which exits at once."""

    def __init__(self, state: TrainState, saving: Saver) -> None:
        self.state, self.saving = state, saving

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None and issubclass(kind, Exception):
            self.saving.rescue(self.state)


class SaveOnOutOfMemory:
    """Saves the last good step when memory runs out in the next one and that error left the state intact."""

    def __init__(self, state: TrainState, saving: Saver) -> None:
        self.state, self.saving = state, saving

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OutOfMemoryError) and error.whole and self.state.step:
            self.saving.rescue(self.state)


def each_batch(batches: Iterable[StepBatch], whole: SaveOnError) -> Iterator[StepBatch]:
    """Yields the batches. Saves the state if reading one raises."""
    stream = iter(batches)
    while True:
        with whole:
            batch = next(stream, None)
        if batch is None:
            return
        yield batch
