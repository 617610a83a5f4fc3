"""What is done between two steps, where the state is whole: evaluation, saving, and what fails there costs no step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from trainwright.errors import OutOfMemory
from trainwright.state.cursor import StepBatch
from trainwright.state.train_state import TrainState


class Periodic(Protocol):
    """Something that is done when it is due: evaluation, saving."""

    def due(self, state: TrainState) -> bool: ...
    def __call__(self, state: TrainState) -> None: ...


class Saver(Periodic, Protocol):
    """Saves; a step that is saved already costs nothing. When it is left, all that was asked for is on disk."""

    def __exit__(self, *error: object) -> None: ...


class _Never:
    def due(self, state: TrainState) -> bool:
        return False

    def __call__(self, state: TrainState) -> None: ...
    def __exit__(self, *error: object) -> None: ...


NEVER = _Never()


class Whole:
    """What fails in here, between two steps, costs no step. Not KeyboardInterrupt: that quits at once."""

    def __init__(self, state: TrainState, saving: Saver) -> None:
        self.state, self.saving = state, saving

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None and issubclass(kind, Exception):
            self.saving(self.state)


class LastGood:
    """Saves the last good step when the next one does not fit into memory: that error leaves the state whole."""

    def __init__(self, state: TrainState, saving: Saver) -> None:
        self.state, self.saving = state, saving

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OutOfMemory) and error.whole and self.state.step:
            self.saving(self.state)


def each_batch(batches: Iterable[StepBatch], whole: Whole) -> Iterator[StepBatch]:
    """The batches; one that cannot be read costs no step either."""
    stream = iter(batches)
    while True:
        with whole:
            batch = next(stream, None)
        if batch is None:
            return
        yield batch
