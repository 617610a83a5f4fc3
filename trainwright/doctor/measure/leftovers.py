"""Finds gradients that the loss of another optimizer has left in a part that this loss was only to pass through."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer

from trainwright.doctor.measure.tensors import MAX_NODES
from trainwright.recorder.gradients import owned_by

_VIEWS = ("TBackward", "Transpose", "Permute", "View", "Reshape", "Expand", "Unsqueeze", "ToCopy", "Alias")
"""Beginnings of the names of nodes through which a weight is still a weight."""
MAX_BACKWARDS = 12  # Backward passes whose graph is read


@dataclass
class _Pass:
    """A backward pass. Optimizers are bits of a number: bit n for optimizer n.

    ``through[n]``: those that were trained through the weights of optimizer n. ``stepped``: those that have updated.
    """

    reached: int
    through: dict[int, int] = field(default_factory=dict)
    stepped: int = 0


class Leftovers:
    """Follows which backward passes the gradients of each optimizer are from.

    In adversarial training the loss of the generator runs through the discriminator and leaves gradients there. The
    generator alone updates. If they are still there when the discriminator's loss, which does not reach the generator,
    adds its gradients, the discriminator's update contains both. ``found`` counts such updates for each optimizer.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._held: list[list[_Pass]] = [[] for _ in optimizers]
        self._backwards = self._pending = 0
        self.found: dict[int, int] = {}

    @property
    def _is_on(self) -> bool:
        return len(self._optimizers) > 1 and self._backwards < MAX_BACKWARDS

    def on_backward(self, losses: Iterable[Tensor]) -> None:
        if not self._is_on:
            return
        self._backwards += 1
        owned = [owned_by(each) for each in self._optimizers]
        bits = {id(p): 1 << n for n, parameters in enumerate(owned) for p in parameters}
        now = _read([loss.grad_fn for loss in losses if loss.grad_fn is not None], bits)
        for n, parameters in enumerate(owned):
            if all(p.grad is None for p in parameters):
                self._held[n].clear()
            if now.reached >> n & 1:
                through_n = (each.through.get(n, 0) & each.stepped & ~now.reached for each in self._held[n])
                self._pending |= any(through_n) << n
                self._held[n].append(now)

    def on_zero_grad(self, owner: Optimizer | nn.Module) -> None:
        if not self._is_on:
            return
        cleared = {id(p) for p in (owned_by(owner) if isinstance(owner, Optimizer) else owner.parameters())}
        for n, each in enumerate(self._optimizers):
            if cleared >= {id(p) for p in owned_by(each)}:
                self._held[n].clear()
                self._pending &= ~(1 << n)

    def on_step(self, optimizer: Optimizer) -> None:
        if not self._is_on or (n := next((n for n, o in enumerate(self._optimizers) if o is optimizer), None)) is None:
            return
        if self._pending >> n & 1:
            self.found[n] = self.found.get(n, 0) + 1
            self._pending &= ~(1 << n)
        for each in (each for held in self._held for each in held):
            each.stepped |= each.reached & 1 << n


def _read(roots: Sequence[Node], bits: dict[int, int]) -> _Pass:
    """Reads the graph once, each node after the nodes behind it: where weights meet values from another optimizer."""
    behind: dict[Node, int] = {}
    weights: set[Node] = set()
    found = _Pass(0)
    waiting: list[tuple[Node, bool]] = [(each, False) for each in roots]
    while waiting and len(behind) < MAX_NODES:
        node, is_ready = waiting.pop()
        if node in behind:
            continue
        following = [each for each, _ in node.next_functions if each is not None]
        if not is_ready:
            waiting.append((node, True))
            waiting += [(each, False) for each in following if each not in behind]
            continue
        behind[node] = bits.get(id(getattr(node, "variable", None)), 0)
        if behind[node] or (type(node).__name__.startswith(_VIEWS) and weights.issuperset(following)):
            weights.add(node)
        for each in following:
            behind[node] |= behind.get(each, 0)
        for each in weights.intersection(following):
            n = behind[each].bit_length() - 1
            for other in following:
                if other not in weights:
                    found.through[n] = found.through.get(n, 0) | behind.get(other, 0) & ~(1 << n)
    for each in roots:
        found.reached |= behind.get(each, 0)
    return found
