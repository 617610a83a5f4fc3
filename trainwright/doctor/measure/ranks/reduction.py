"""Finds gradients of means that a loop sums over the ranks by hand without a division."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, distributed

from trainwright.checkpoint.checksums import Checksums, no_checksums, start_checksums
from trainwright.recorder.program import Backward, Operation, RecordedStep, Slot

MEANS = frozenset(
    {"mean", "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"}
    | {"binary_cross_entropy", "binary_cross_entropy_with_logits", "gaussian_nll_loss", "poisson_nll_loss"}
)
DIVISIONS = frozenset({"div", "__truediv__", "true_divide", "div_"})


class SumWatch:
    """Tracks the gradients of one step through an ``all_reduce`` call of the loop.

    They are undivided if each was reduced as backward left it, with a sum, and was used unchanged.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self.made()

    def made(self) -> None:
        """Records the gradients after a backward pass."""
        self.as_made: Checksums = start_checksums([p.grad for p in self._parameters])
        self._reduced: dict[int, tuple[Checksums, Checksums]] = {}  # before and after the reduction
        self._used: bool | None = None

    def before(self, tensor: Tensor, operation: object) -> None:
        """Called before ``tensor`` is reduced."""
        if operation == distributed.ReduceOp.SUM and (index := self._index_of(tensor)) is not None:
            self._reduced[index] = (start_checksums([tensor]), no_checksums)

    def after(self, tensor: Tensor) -> None:
        """Called after ``tensor`` was reduced."""
        if (index := self._index_of(tensor)) is not None and index in self._reduced:
            self._reduced[index] = (self._reduced[index][0], start_checksums([tensor]))

    def used(self) -> None:
        """Called before the gradients are clipped, unscaled, or used for the update. The first call counts."""
        if self._used is None and self._reduced:
            now = start_checksums([p.grad for p in self._parameters])()
            self._used = all(after() == [now[index]] for index, (_, after) in self._reduced.items())

    def _index_of(self, tensor: Tensor) -> int | None:
        address = tensor.data_ptr()
        grads = ((n, p.grad) for n, p in enumerate(self._parameters))
        return next((n for n, grad in grads if grad is not None and grad.data_ptr() == address), None)

    def are_undivided(self, step: RecordedStep, num_ranks: int) -> bool:
        """Returns True if the sums of this step were of mean losses and were not divided. Drops the step."""
        reduced, used, made = self._reduced, self._used, self.as_made
        self._reduced, self._used, self.as_made = {}, None, no_checksums
        if not reduced or not used:
            return False
        sums, divisor = made(), divisor_of_mean(step)
        went_in = all(before() == [sums[index]] for index, (before, _) in reduced.items())
        return went_in and divisor is not None and divisor % num_ranks != 0


def is_divided_again(step: RecordedStep, num_ranks: int, micro_batches: int) -> bool:
    """Returns True if the loss is a mean that was divided by the number of ranks besides that of micro-batches.

    Half a squared error is not counted as a division by two ranks.
    """
    divisor = divisor_of_mean(step)
    is_half = divisor == 2 and any(isinstance(each, Operation) and each.name == "mse_loss" for each in step.program)
    return divisor == num_ranks * max(1, micro_batches) and not is_half


def divisor_of_mean(step: RecordedStep) -> float | None:
    """Returns the divisor of a loss after its mean over the batch of one rank; None without one."""
    made_by = {number: each for each in step.program if isinstance(each, Operation) for number in each.outputs}
    last = next((each for each in reversed(step.program) if isinstance(each, Backward)), None)
    slot, divisor = last.slot if last else None, 1.0
    while slot is not None and (operation := made_by.get(slot)) is not None:
        if operation.name in MEANS:
            return divisor if operation.kwargs.get("reduction", "mean") == "mean" else None
        first, *others = operation.args
        if operation.name not in DIVISIONS or not others or not isinstance(others[0], int | float):
            return None
        divisor, slot = divisor * others[0], first.number if isinstance(first, Slot) else None
    return None
