"""Hears whether the steps of our own engine do something else than before: they have no tape while they train."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from torch import Tensor, nn

from trainwright.recorder.program_changes import KnownPrograms, names_of_nodes
from trainwright.recorder.resting import EVERY


class EngineChanges:
    """Compares the programs of steps, as far as they show without a tape.

    A program is made of the nodes of the autograd graph behind the losses, of how often the step, and whatever comes
    between two steps, writes to each parameter, of the modes of the modules, of which parameters want a gradient, and
    of whether the learning rate is 0.
    """

    def __init__(self, modules: Iterable[nn.Module], parameters: Sequence[Tensor]) -> None:
        self._modules = list(modules)
        self._parameters = [p for p in parameters if not p.is_inference()]
        self._known = KnownPrograms()
        self._is_due = False
        self._graphs: set[tuple[str, ...]] = set()
        self._flags: Hashable = ()
        self._left: list[int] = []
        self._found: list[int] = []

    def step_begins(self) -> None:
        """Must be called before the first forward pass of a step."""
        if self._is_due:
            self._found = self._versions()
            self._flags = (
                tuple([each.training for each in self._modules]),
                tuple([each.requires_grad for each in self._parameters]),
            )

    def loss_is_made(self, loss: Tensor) -> None:
        """Must be called with the loss of each micro-batch, whose graph is there."""
        if self._is_due:
            self._graphs.add(tuple(names_of_nodes(loss.grad_fn)))

    def is_new(self, step: int, lr: float) -> bool:
        """Whether ``step``, whose update was applied just now, had another program than all before."""
        if not self._is_due:
            return False
        writes = tuple([after - before for before, after in zip(self._found, self._versions())])
        between = tuple([after - before for before, after in zip(self._left, self._found)])
        return self._known.is_new(step, frozenset(self._graphs), writes, between, self._flags, lr == 0)

    def prepare_next(self, step: int) -> bool:
        """Must be called when all that is done beside ``step`` is done: replays write to the parameters, too.

        Returns whether the step after it is compared.
        """
        self._is_due = self._known.is_next_due(step)
        if self._is_due:
            self._graphs.clear()
            self._left = self._versions()
        return self._is_due

    @staticmethod
    def next_at(step: int) -> int:
        """The next step after ``step`` to call ``prepare_next`` after, where ``step + 1`` is not compared."""
        return (step // EVERY + 1) * EVERY

    def _versions(self) -> list[int]:
        return [p._version for p in self._parameters]
