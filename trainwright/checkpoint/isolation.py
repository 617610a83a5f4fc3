"""Runs code of the user once more and leaves no trace, or says why that is not possible."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainwright.checkpoint.effects import NotIsolated as NotIsolated
from trainwright.checkpoint.effects import no_effects
from trainwright.checkpoint.reach import ReachableState


@contextmanager
def isolated(state: ReachableState) -> Iterator[None]:
    """Puts ``state`` back on exit, and lets nothing inside act outside of the process.

    The global random number generators are left to ``preserved_rng``.

    Raises:
        NotIsolated: Before anything runs, if something can be reached that cannot be put back; on exit, if something
            was refused or could not be put back.
    """
    if state.gaps:
        raise NotIsolated(state.gaps[0])
    with no_effects() as refused:
        try:
            yield
        except Exception as error:
            if refused:  # the code may have made another exception of it
                raise NotIsolated(refused[0]) from error
            raise
        finally:
            lost = state.put_back()
    if refused or lost:
        raise NotIsolated(refused[0] if refused else f"{lost[0]} has changed and cannot be put back")
