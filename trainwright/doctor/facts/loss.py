"""Measurements of loss functions: their arguments, and the weights of their terms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import ClassVar

from trainwright.doctor.context import Every
from trainwright.runs.records import Where


@dataclass(frozen=True)
class MeasuredLoss:
    """One place that calls a loss function or a softmax, over the examined steps."""

    op: str  # The torch function; "squared error" and "absolute error" for those written by hand, "entropy" for p log p
    shape: tuple[int, ...] = ()  # Shape of its input
    module: str | None = None  # Path of the module that calls it; None for the loop
    made_in: str | None = None  # Path of the module whose softmax or sigmoid made the input
    made_at: str | None = None  # Line of the softmax or sigmoid that made the input
    line: str | None = None  # ``file.py:line`` of the call; None for a call of the loop that was measured in a replay
    steps: int = 1  # Examined steps in which it was called
    classes: int = 0  # Classes of a classification loss, else 0
    simplex: bool = False  # All rows of the input are probabilities: none is negative, and they sum to 1
    squashed: bool = False  # The input of a binary loss with logits is the output of a sigmoid or softmax
    above_0: float = 0.0  # Fraction of the input above 0
    off_sum: float = 0.0  # For nll_loss and ctc_loss, the median over rows of ``abs(exp(input).sum() - 1)``
    bound: str = ""  # Function with bounded values that made the input; "" without one
    room: float = 1.0  # Gain of the best input within these bounds over equal scores, as a fraction; 1 without bounds
    outside: float = 0.0  # Fraction of the targets beyond these bounds
    wants: int = 0  # 1 if a smaller value makes the total loss smaller in every step, -1 if a larger one does, else 0
    values: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())  # Mean loss of the first 8 and last 8 steps
    # For at most 8 of the last steps: loss, loss of the best constant prediction, loss with shuffled targets
    rows: tuple[tuple[float, float, float], ...] = ()
    ignored: float = 0.0  # Fraction of the targets that ignore_index leaves out
    ignored_class: int | None = None  # The ignore_index if it is a valid class, else None
    ignored_inside: float = 0.0  # Fraction of the sequences with a target of that index between others
    rows_without: float = 0.0  # Fraction of rows in which all targets are ignored, if others begin with ignored ones
    weights_of: tuple[int, ...] = ()  # For each class weight, the class whose frequency it fits; () if its own may be
    inverted: bool = False  # Class weights rise with the frequencies of the classes
    own_pairs: bool = False  # Similarities whose diagonal, each sample with itself, is the largest and no target
    reverses: bool = False  # A custom autograd Function is between the parameters and the input


@dataclass(frozen=True)
class Broadcast:
    """A function that should compare ``samples`` predictions with targets, but broadcasts them to ``terms`` pairs."""

    op: str
    shapes: tuple[tuple[int, ...], ...]
    terms: int
    samples: int
    line: str | None = None


@dataclass(frozen=True)
class LossSign:
    """A mistake in the operations between the outputs and the loss."""

    kind: str  # The name of the mistake, set in measure/loss_calls.py and measure/loop_signs.py
    op: str
    steps: int  # Number of examined steps with the mistake
    line: str | None = None  # Its source line
    value: float = 0.0  # The ratio of two terms, or a number of steps


@dataclass(frozen=True)
class LossFacts:
    """Calls of loss functions, live or in a replay."""

    experiment: ClassVar[str] = "loss"
    given: tuple[MeasuredLoss, ...] = ()  # The calls
    outer: tuple[Broadcast, ...] = ()  # Pairs of tensors that broadcast to a square
    signs: tuple[LossSign, ...] = ()  # Other mistakes
    drawn: bool = False  # A step draws random samples after the forward pass, as a policy does
    terms: int = 0  # Number of terms of the loss
    rivals: bool = False  # There are several models or optimizers
    maximizes: bool = False  # The optimizers have ``maximize=True``
    reached: int = 1  # Number of parameters with a gradient
    steps: int = 1  # Number of examined steps, 1 in a replay


@dataclass(frozen=True)
class TermFacts:
    """A term of the loss."""

    name: str  # The operation that makes it
    weight: float  # Its weight, including the factors of the full sum
    own: float  # Its weight without the factors of the full sum
    shared: float  # Norm of its weighted gradient over the parameters that every term reaches


@dataclass(frozen=True)
class TermsFacts:
    """The terms of the loss in one step. ``shared`` is the number of parameters that all terms reach."""

    experiment: ClassVar[str] = "terms"
    terms: tuple[TermFacts, ...]
    shared: int


MIN_GAIN = 0.02  # Minimum gain over a constant prediction, as a fraction of its loss, if anything was learned
MAX_ERROR = 0.04  # Maximum standard error of this gain


def learned_nothing(call: MeasuredLoss) -> bool:
    """Returns True if the last loss was no lower than that of a constant prediction, nor than with shuffled targets."""
    value, constant, shuffled = (fmean(column) for column in zip(*call.rows))
    if not math.isfinite(value + constant + shuffled) or constant <= 1e-12:
        return False
    gained = [(row[1] - row[0]) / constant for row in call.rows]
    lost_by_shuffling = [(row[2] - row[0]) / constant for row in call.rows]
    error = max(stdev(gained), stdev(lost_by_shuffling)) / math.sqrt(len(call.rows))
    return error < MAX_ERROR and max(fmean(gained), fmean(lost_by_shuffling)) < MIN_GAIN + error


def explains_little(call: MeasuredLoss) -> bool:
    """Returns True if the last predictions reduced the loss of a constant one by less than a tenth."""
    value, constant, _ = (fmean(column) for column in zip(*call.rows))
    return math.isfinite(value + constant) and constant > 1e-12 and value > 0.9 * constant


def sign_of(exams: Every[LossFacts], kind: str) -> LossSign | None:
    """Returns the newest sign of a kind; None if the newest measurement of the loop has none."""
    facts = over_most_steps(exams) if exams else LossFacts()
    return next((each for each in facts.signs if each.kind == kind), None)


CONSEQUENCES_OF_WRONG_ARGUMENTS = (
    "data.label_feature_misaligned",
    "model.init_symmetric",
    "model.init_too_large",
    "model.output_same_for_all_samples",
    "optim.lr_too_high",
    "optim.lr_too_low",
)
"""Findings that follow from wrong arguments of a loss function."""


def calls(exams: Every[LossFacts]) -> Iterator[tuple[int, LossFacts, MeasuredLoss]]:
    """Yields each measured call of a loss function with the step of the measurement, newest first."""
    for step, facts in reversed(exams):
        for call in facts.given:
            yield step, facts, call


def over_most_steps(exams: Every[LossFacts]) -> LossFacts:
    """Returns the newest facts that cover the most steps. A newer replay covers one step only."""
    return max((facts for _, facts in reversed(exams)), key=lambda each: each.steps)


def where_of(call: MeasuredLoss, module: str | None = None) -> Where:
    """Returns the place of a call. ``module`` replaces the calling module."""
    op = None if call.op in ("squared error", "absolute error", "entropy", "cosine similarity") else call.op
    return Where(
        op=op,
        module=call.module if module is None else module,
        source=call.made_at or call.line,
        shown_at=(call.line or call.made_at) if call.made_at else None,
    )


@dataclass(frozen=True)
class AccumulationFacts:
    """A step with several backward passes."""

    experiment: ClassVar[str] = "accumulation"
    backwards: int  # Number of backward passes
    is_plain: bool = False  # Each pass has a batch of its own and the same functions, and gradients are left alone
    weights: tuple[float | None, ...] = ()  # For each micro-batch, the derivative with respect to its mean loss
    counts: tuple[float | None, ...] = ()  # For each micro-batch, the number of elements in this mean
    discarded: int = 0  # Backward passes whose gradients are dropped before the update
    norm_then: float | None = None  # Norm of the gradients at the recorded update
    norm_now: float | None = None  # Norm of the gradients at the replayed update
    of_transformers: bool = False  # The loop is that of transformers' Trainer

    @property
    def is_as_recorded(self) -> bool:
        """Returns True if the replayed gradients have the recorded norm, so that nothing else scaled them."""
        then, now = self.norm_then, self.norm_now
        return not then or not now or abs(then - now) < 0.05 * now
