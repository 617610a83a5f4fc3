"""A mode for torch functions that can be started and stopped from anywhere, however many modes are above it."""

from __future__ import annotations

import torch
from torch._C import _pop_torch_function_stack, _push_on_torch_function_stack
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack


class PausableMode(TorchFunctionMode):
    """Off until ``start``. ``running``: torch functions are to be looked at; a subclass passes them on where not.

    ``pushed``: it is in torch's stack of modes. Where it is not, ``stop`` has nothing to do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running = self.pushed = False

    def start(self) -> None:
        self.running = True
        if not self.pushed:
            _push_on_torch_function_stack(self)
            self.pushed = True

    def stop(self) -> None:
        """Removes this mode from torch's stack of modes, wherever it is in it."""
        self.running = False
        if not self.pushed:
            return
        num_modes = torch._C._len_torch_function_stack()
        if num_modes and torch._C._get_function_stack_at(num_modes - 1) is self:  # nearly always
            _pop_torch_function_stack()
            self.pushed = False
            return
        if self not in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            return  # it is around the function that this is called from: the next stop will find it
        above = []
        while (top := _pop_torch_function_stack()) is not self:
            above.append(top)
        for mode in reversed(above):
            _push_on_torch_function_stack(mode)
        self.pushed = False
