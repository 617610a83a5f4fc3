"""State that a forward call depends on besides its arguments: modes, ``requires_grad``, random state."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor, nn

_TRAINING, _REQUIRES_GRAD = operator.attrgetter("training"), operator.attrgetter("requires_grad")


class CallState:
    """Reads modes, ``requires_grad`` and random states before each call. Equal values of one step are one object."""

    def __init__(self, modules: Sequence[nn.Module], parameters: Sequence[Tensor], device: torch.device) -> None:
        self.modules, self._parameters, self._device = modules, parameters, device
        self._last_modes: tuple[bool, ...] = ()
        self._last_wanted: tuple[bool, ...] = ()
        self._last_rng, self._step = torch.empty(0, device="cpu"), -1

    def modes_and_wanted(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """Returns ``training`` of every module, and ``requires_grad`` of every parameter."""
        modes, wanted = tuple(map(_TRAINING, self.modules)), tuple(map(_REQUIRES_GRAD, self._parameters))
        if modes != self._last_modes:
            self._last_modes = modes
        if wanted != self._last_wanted:
            self._last_wanted = wanted
        return self._last_modes, self._last_wanted

    def rng(self, step: int) -> tuple[Tensor, Tensor | None]:
        """Returns the states of the default CPU generator and of the GPU generator (None without a GPU).

        The first call of a step skips the comparison with the last state, which takes longer than reading the state.
        """
        now = torch.default_generator.get_state()
        if step != self._step or not torch.equal(now, self._last_rng):
            self._last_rng, self._step = now, step
        return self._last_rng, torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
