"""Tracks the consumers of tensors that have lost their graph: the weights that use them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import Tensor

from trainwright.recorder.program import tensors_of


class Consumers:
    """The weights that are applied to values computed from each cut, by the number of the cut.

    A value that no trained weight uses is not on the path to the loss: the output of a teacher, a target, a factor.
    ``names`` are the names of the parameters, by their ids.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._weights = {number: {name} for number, name in names.items()}
        self._made_of: dict[int, set[int]] = {}
        self._kept: list[Tensor] = []  # holds references so that no id is reused
        self._found: defaultdict[int, set[str]] = defaultdict(set)

    def record(self, inputs: list[Tensor], result: object, cut: int | None) -> None:
        """Records a function call. ``cut`` is the number of the cut that it makes."""
        cuts = {number for t in inputs for number in self._made_of.get(id(t), ())}
        weights = {name for t in inputs for name in self._weights.get(id(t), ())}
        for number in cuts:
            self._found[number] |= weights
        cuts |= {cut} if cut is not None else set()
        of_weights = weights if inputs and all(id(t) in self._weights for t in inputs) else set()
        for made in tensors_of(result) if cuts or of_weights else ():
            self._kept.append(made)
            if cuts:
                self._made_of[id(made)] = self._made_of.get(id(made), set()) | cuts
            else:
                self._weights.setdefault(id(made), of_weights)

    def of(self, cut: int) -> set[str]:
        return self._found[cut]
