"""Follows what is made of tensors that have lost their graph: which weights take it in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import Tensor

from trainwright.recorder.program import tensors_of


class Consumers:
    """The weights that are called with what is made of each cut, by the number of the cut.

    What no trained weight takes in lies beside the way to the loss: the answer of a teacher, a target, a factor.
    ``names`` are those of the parameters, by their ids.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._weights = {number: {name} for number, name in names.items()}
        self._made_of: dict[int, set[int]] = {}
        self._kept: list[Tensor] = []  # so that no id is used again
        self._found: defaultdict[int, set[str]] = defaultdict(set)

    def note(self, inputs: list[Tensor], result: object, cut: int | None) -> None:
        """A function was called; ``cut`` is the number of the cut that it makes."""
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
