"""Several optimizers over disjoint parameters, stepped together as one."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from trainwright.checkpoint.codec import StateDict


class ChainedOptimizer(Optimizer):
    """Steps its ``parts`` one after the other. Groups and state stay in the parts, which may replace them."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = tuple(parts)  # without Optimizer.__init__, which would create separate groups and state

    @property
    def param_groups(self) -> list[StateDict]:  # type: ignore[override]
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> Mapping[Tensor, StateDict]:  # type: ignore[override]
        """A read-only copy of the outer mapping."""
        return {key: own for part in self.parts for key, own in part.state.items()}

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def __deepcopy__(self, memo: dict[int, object]) -> ChainedOptimizer:
        return ChainedOptimizer([copy.deepcopy(part, memo) for part in self.parts])

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.parts))


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers that a ChainedOptimizer steps, or a tuple of the optimizer itself."""
    return optimizer.parts if isinstance(optimizer, ChainedOptimizer) else (optimizer,)
