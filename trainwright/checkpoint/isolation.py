"""Runs code of the user once more without side effects, or raises if that is impossible."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from trainwright.checkpoint.effects import NotIsolated as NotIsolated
from trainwright.checkpoint.effects import no_effects
from trainwright.checkpoint.reach import ReachableState


@contextmanager
def isolated(state: ReachableState, *, may_write: bool = False) -> Iterator[None]:
    """Restore ``state`` on exit, and prevent effects outside of the process meanwhile unless the code ``may_write``.

    The global random number generators are handled by ``preserved_rng``.

    Raises:
        NotIsolated: Before anything runs, if state that cannot be restored is reachable; on exit, if an effect was
            prevented or something could not be restored.
    """
    if state.gaps:
        raise NotIsolated(state.gaps[0])
    with nullcontext(list[str]()) if may_write else no_effects() as prevented:
        try:
            yield
        except Exception as error:
            if prevented:  # the code may have replaced the exception
                raise NotIsolated(prevented[0]) from error
            raise
        finally:
            lost = state.put_back()
    if prevented or lost:
        raise NotIsolated(prevented[0] if prevented else f"{lost[0]} has changed and cannot be put back")


@contextmanager
def not_compiled() -> Iterator[None]:
    """Context in which compiled code runs uncompiled, in all threads.

    Compilation writes files, and would include the hooks and modes of a dry run or a replay. The setting of torch is
    global, so it is restored when the last thread leaves such a context. If each thread restored the value that it
    found, one could restore a setting made by another.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import takes a second
        yield
        return
    with _Uncompiled.lock:
        _Uncompiled.users += 1
        if _Uncompiled.users == 1:
            _Uncompiled.stance = torch.compiler.set_stance("force_eager")
    try:
        yield
    finally:
        with _Uncompiled.lock:
            _Uncompiled.users -= 1
            if not _Uncompiled.users:
                _Uncompiled.stance.__exit__(None, None, None)
                del _Uncompiled.stance


class _Uncompiled:
    """The contexts of all threads in which compiled code runs uncompiled."""

    lock = threading.Lock()
    users = 0
    stance: AbstractContextManager[object]
