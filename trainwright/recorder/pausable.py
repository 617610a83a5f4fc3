"""A mode for torch functions that can be started and stopped anywhere, and contexts without the user's modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch._C import (
    _get_function_stack_at,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack


class PausableMode(TorchFunctionMode):
    """Off until ``start``. ``running``: torch functions are observed; otherwise a subclass passes them on.

    ``pushed``: it is on torch's stack of modes; otherwise ``stop`` has nothing to do. It is always below the user's
    modes, because each of these removes the top mode of the stack when it ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running = self.pushed = False

    def start(self) -> None:
        self.running = True
        if not self.pushed:
            above = _pop_users_modes() if _len_torch_function_stack() else []
            _push_on_torch_function_stack(self)
            self.pushed = True
            if above:
                _push(above)

    def stop(self) -> None:
        """Removes this mode from torch's stack of modes, at any position."""
        self.running = False
        if not self.pushed:
            return
        num_modes = torch._C._len_torch_function_stack()
        if num_modes and torch._C._get_function_stack_at(num_modes - 1) is self:  # the usual case
            _pop_torch_function_stack()
            self.pushed = False
            return
        if self not in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            return  # torch has taken it off the stack while it handles this call: the next stop will find it
        above = []
        while (top := _pop_torch_function_stack()) is not self:
            above.append(top)
        _push(above)
        self.pushed = False


def _is_users(mode: object) -> bool:
    """Returns True if a mode is neither the recorder's nor the default device at the bottom of the stack."""
    return not isinstance(mode, PausableMode | DeviceContext)


def _pop_users_modes() -> list[TorchFunctionMode]:
    """Removes the user's modes, which are on top of the stack. Returns them, top first."""
    return _pop_while(_is_users)


def _pop_while(is_removed: Callable[[object], bool]) -> list[TorchFunctionMode]:
    modes = []
    while (count := _len_torch_function_stack()) and is_removed(_get_function_stack_at(count - 1)):
        modes.append(_pop_torch_function_stack())
    return modes


def _push(modes: list[TorchFunctionMode]) -> None:
    for mode in reversed(modes):
        _push_on_torch_function_stack(mode)


def has_users_modes() -> bool:
    """Returns True if a user's mode currently handles torch functions or operators. Takes 0.1 us."""
    count = _len_torch_function_stack()
    if count > 0 and _is_users(_get_function_stack_at(count - 1)):
        return True
    return _len_torch_dispatch_stack() > 0 and not all(
        getattr(each, "is_trainwright_mode", False) for each in _get_current_dispatch_mode_stack()
    )


@contextmanager
def without_users_modes() -> Iterator[None]:
    """Context in which the user's modes do not observe the recorder's operations."""
    if not has_users_modes():
        yield
        return
    modes = _pop_users_modes()
    try:
        with _disable_current_modes():
            yield
    finally:
        _push(modes)


@contextmanager
def without_modes() -> Iterator[None]:
    """Context without the user's and the recorder's modes. No PausableMode may start or stop in it."""
    modes = _pop_while(lambda mode: not isinstance(mode, DeviceContext)) if _len_torch_function_stack() else []
    try:
        with _disable_current_modes() if _len_torch_dispatch_stack() else nullcontext():
            yield
    finally:
        _push(modes)
