"""What is measured of the data: rows by their content, samples by their number, features by their scale."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

SAME = 8
"""Steps in a row on the same batch that are no chance, and no few updates on each batch."""

PIXELS = 2
"""By which one side of all pictures may differ for a bound that is off: another size changes both sides, or by more."""


@dataclass(frozen=True, kw_only=True)
class EvaluatedRows:
    """An evaluation: after which step, how many rows, and how many of them had been trained on by now.

    ``mixed`` of its ``calls`` read some rows that had been trained on and some that had not, a tenth of each at least.
    ``again`` are rows that an evaluation before it had read, ``distinct`` those that differ. ``trained``: how many rows
    had been trained on by then.
    """

    step: int
    calls: int
    rows: int
    shared: int
    mixed: int
    digest: int
    again: int = 0
    distinct: int = 0
    trained: int = 0


@dataclass(frozen=True, kw_only=True)
class RowsFacts:
    """The rows of the inputs of training, recognised by their content.

    Of ``rows`` that were read in ``steps``, ``distinct`` differ; ``new_lately`` is the share of new ones in the last
    steps. In ``same`` steps in a row, up to step ``same_to``, all were those of the step before, in its order; in any
    other run ``same_before`` at most. ``is_within``: the place of the program that made these steps has trained on
    other rows as well. A step has ``batch`` rows. The set that they come from holds ``whole`` rows, as far as is known
    (0: not). ``repeated_micro``: the most micro-batches of a step that were all the same, in ``repeated_micro_steps``
    steps.

    ``compared`` pairs of steps that follow each other share ``shared_next`` rows, pairs that are further apart
    ``shared_far``, on the mean; ``partly`` of the pairs share some rows, and not all. ``is_continuous``: two samples
    are never equal by chance. The last of ``num_evaluations`` came in step ``evaluated_at``;
    ``is_between``: it stands between two loops of the program. ``are_changed``: the rows of the last two are of
    the same samples, and differ.
    """

    experiment: ClassVar[str] = "rows"
    steps: int
    rows: int = 0
    distinct: int = 0
    new_lately: float = 1.0
    batch: int = 0
    same: int = 0
    same_to: int = 0
    same_before: int = 0
    is_within: bool = False
    whole: int = 0
    repeated_micro: int = 0
    repeated_micro_steps: int = 0
    compared: int = 0
    shared_next: float = 0.0
    shared_far: float = 0.0
    partly: int = 0
    is_continuous: bool = True
    evaluations: tuple[EvaluatedRows, ...] = ()
    num_evaluations: int = 0
    evaluated_at: int = 0
    is_between: bool = False
    are_changed: bool = False


@dataclass(frozen=True, kw_only=True)
class LoaderEpochs:
    """The last two epochs of a loader over a data set of ``samples``: how many were drawn in the newer one, how many
    of these differ, and how many were drawn in neither. ``tail``: what an incomplete batch may leave out.
    ``chosen``: the sampler is made for a part of the data, or draws some of them several times.
    """

    samples: int
    drawn: int
    distinct: int
    never: int
    first_never: tuple[int, ...]
    same_set: bool
    tail: int
    chosen: bool
    sampler: str


@dataclass(frozen=True, kw_only=True)
class DrawsFacts:
    """What the loaders that were trained on have drawn.

    Of the ``given`` ones that the watch was called with, ``given_read`` were iterated over; ``others_trained``: batches
    of other loaders that came in a mode with gradients; ``others_evaluated``: one of these gave batches without, too.

    Passes over a loader without gradients, in which a watched model was called: ``passes`` of them with ``batches``,
    and ``passes_with_fewer`` calls than three quarters of their batches; the last of these had ``calls``.
    """

    experiment: ClassVar[str] = "draws"
    epochs: tuple[LoaderEpochs, ...] = ()
    given: int = 0
    given_read: int = 0
    others_trained: int = 0
    others_evaluated: bool = False
    passes: int = 0
    passes_with_fewer: int = 0
    batches: int = 0
    calls: int = 0


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A column, channel or feature of the inputs: its mean and deviation."""

    number: int
    mean: float
    std: float


@dataclass(frozen=True, kw_only=True)
class FeaturesFacts:
    """The features of the floating-point inputs of the last steps, over ``rows``. ``rms`` is that of all together.

    ``usual`` is the median of the deviations of those ``features`` that vary; ``largest`` and ``smallest`` vary most
    and least of them, ``farthest`` has its mean the most deviations away from 0.
    """

    experiment: ClassVar[str] = "features"
    rows: int = 0
    features: int = 0
    constant: int = 0
    rms: float = 0.0
    usual: float = 0.0
    largest: Feature | None = None
    smallest: Feature | None = None
    farthest: Feature | None = None


@dataclass(frozen=True, kw_only=True)
class StandardisedFacts:
    """The losses of the recorded steps, run again from one state: as they were, and with standardised inputs."""

    experiment: ClassVar[str] = "standardised_steps"
    as_it_was: tuple[float, ...]
    standardised: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class LoopFiguresFacts:
    """Numbers that the loop keeps under a local name, and that change with its evaluations and at no other step.

    ``names`` and ``values`` belong together: the last value of each. ``changes`` is how often it changed.
    """

    experiment: ClassVar[str] = "told"
    names: tuple[str, ...] = ()
    values: tuple[float, ...] = ()
    changes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Computed:
    """Averages over a batch, of numbers that left torch at ``line``: what they are of, and the range of their values.

    ``decided``: shares of what is right, and not losses. ``times``: how many there are.
    """

    of: str
    line: str | None
    times: int
    low: float
    high: float
    decided: bool


@dataclass(frozen=True, kw_only=True)
class KeptNumber:
    """A number that the loop has after an evaluation, and had not before, made of those that left torch at ``line``.

    ``of`` says what these are, ``right`` the mean of them over the ``whole`` number of rows, ``noise`` its standard
    error. ``wrong`` says what is wrong with the number; empty: nothing. ``is_plain``: it is one of them, or a sum.
    ``decided``: it is a share of decisions. ``is_factor``: the mean over the rows times a number. ``is_negated``: the
    mean with the other sign. ``is_sum``: the sum over its rows, as another function has returned it. ``elements``: of
    so many the numbers that left torch were made. ``divisor`` says, like ``of``, of what the numbers are that it is
    divided by, if any; ``over`` is the number of the pass over data.
    """

    name: str
    value: float
    of: str = ""
    line: str | None = None
    is_plain: bool = False
    wrong: str = ""
    decided: bool = False
    is_factor: bool = False
    is_negated: bool = False
    is_sum: bool = False
    elements: int = 0
    right: float = 0.0
    whole: float = 0.0
    noise: float = 0.0
    divisor: str | None = None
    over: int = 0


@dataclass(frozen=True, kw_only=True)
class TrainingAveragesFacts:
    """What the loop has made of the losses of an epoch of so many ``steps``."""

    experiment: ClassVar[str] = "training_averages"
    steps: int
    numbers: tuple[KeptNumber, ...]


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """The inputs of an evaluation, over ``samples``, against those of training: of the median feature how far the means
    are apart, in deviations of training, with its standard error ``noise``, and the ``ratio`` of the deviations.
    ``is_cut``: training has whole numbers alone, and most of those of the evaluation are none. Each row is of the shape
    ``trained`` and ``evaluated``; empty: of several. A tenth of the features, and three at least, are ``part_shift``
    deviations away or more; where there are few features it is 0.
    """

    samples: int
    shift: float
    ratio: float
    noise: float
    is_cut: bool = False
    trained: tuple[int, ...] = ()
    evaluated: tuple[int, ...] = ()
    part_shift: float = 0.0

    @property
    def is_cropped(self) -> bool:
        """Whether pictures differ in one of both sides, by a pixel or two."""
        sides = [abs(one - other) for one, other in zip(self.trained[-2:], self.evaluated[-2:])]
        is_of_pictures = len(self.trained) == len(self.evaluated) > 2
        return is_of_pictures and min(sides) == 0 < max(sides) <= PIXELS

    @property
    def distance(self) -> float:
        """How unlike they are: the shift, or the logarithm of the ratio."""
        return math.inf if self.is_cut else max(self.shift, abs(math.log(max(self.ratio, 1e-6))))


@dataclass(frozen=True, kw_only=True)
class DecidedFigure:
    """The sum of ``times`` numbers of decisions that left torch at ``line``, ``of`` one kind in one pass ``over`` data:
    as they were ``told``, with predictions that the loss of the same evaluation calls ``perfect``, and with ``wrong``
    ones. ``compared``: no loss says what is perfect, but what the decisions are tested for equality with. ``sum_name``
    is the variable that the line adds them to, or sets; "" where it does neither. ``asks``: "" of classes; of single
    elements whether they equal the targets (equality), how they overlap with them (overlap), or nothing about targets
    (none); how many scores are larger than that of the target (rank). ``is_exact``: no mask and no constant has a part
    in it. ``is_elsewhere``: it stays 0 whatever is predicted where the loss counts.
    """

    line: str | None
    times: int
    is_mean: bool
    told: float
    perfect: float
    wrong: float
    compared: bool = False
    sum_name: str = ""
    of: str = ""
    over: int = 0
    asks: str = ""
    is_exact: bool = False
    is_elsewhere: bool = False


BEST_SHARES = (1, 100)
"""Of a share that is explained (R squared), which is no distance."""


@dataclass(frozen=True, kw_only=True)
class DistanceFigure:
    """The mean of the numbers that left torch at ``line``, of outputs and what they are compared with, of ``rows`` at
    least: as it was ``told``, with both ``equal``, and ``apart``, where the same mean stands for every row.
    """

    line: str | None
    rows: int
    told: float
    equal: float
    apart: float


@dataclass(frozen=True, kw_only=True)
class TurnedFigure:
    """The mean of the numbers that left torch at ``line``, distances of outputs from a reference: as it was ``told``,
    and ``turned``, with the other sign of the outputs.
    """

    line: str | None
    told: float
    turned: float


@dataclass(frozen=True, kw_only=True)
class PermutedFigure:
    """The mean of the numbers that left torch at ``line``, as it was ``told``, and with the outputs in random orders of
    their rows: the mean of ``others`` and their ``deviation``. ``nearby``: with each output one or two rows beside its
    own. ``decided``: it is made of decisions, ``of`` one kind in one pass ``over`` data; ``sum_name`` is the variable
    that the line adds them to, or sets. ``is_blind``: what they are tested for equality with has one value everywhere.
    """

    line: str | None
    told: float
    others: float
    deviation: float
    nearby: tuple[float, ...] = ()
    decided: bool = False
    of: str = ""
    over: int = 0
    sum_name: str = ""
    is_blind: bool = False


@dataclass(frozen=True, kw_only=True)
class ChosenRows:
    """Of an output with ``size`` rows, made of the same inputs in training and in the evaluation, a loss of training
    has chosen ``trained``. The evaluation has chosen ``rows``, of which ``shared`` are among them; of these ``alike``
    have the same target as in training.
    """

    size: int
    trained: int
    rows: int
    shared: int
    alike: int


@dataclass(frozen=True, kw_only=True)
class EvaluationFacts:
    """One evaluation, after step ``after``: its calls of the model, their rows, what was computed of the outputs, and
    what the loop has now.

    ``figures``: losses and accuracies, by their names, that it did not have before. ``shares``: numbers with names of
    shares, where decisions were counted. ``arrays``: outputs that left torch
    as arrays, of which nothing is known. ``most_rows``: of a call. ``single``: the mean that left torch at
    ``single_line`` where it is of one element, and there is no other. ``at_once``: lines where numbers left torch that
    are made of one decision over all rows and columns. ``mass``: what was given to ``nll_loss``
    at ``mass_line`` as logarithms of probabilities, by how much their sum differs from 1; -1 where it was not called.
    ``likeness`` is that of the first floating-point input, ``further`` those of others. ``counted``: sums of what left
    torch at a line each, and was made of no output, in the functions that count decisions. ``chosen``: the rows of
    outputs that this evaluation and those before it have chosen, each choice once. ``undefined``: where nothing but nan
    left torch, of outputs that are none, and the loop has kept it.
    """

    experiment: ClassVar[str] = "evaluation"
    after: int
    calls: int
    rows: int
    most_rows: int
    arrays: int
    computed: tuple[Computed, ...]
    numbers: tuple[KeptNumber, ...]
    figures: dict[str, float] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    mass: float = -1.0
    mass_line: str | None = None
    likeness: Likeness | None = None
    further: tuple[Likeness, ...] = ()
    decided: tuple[DecidedFigure, ...] = ()
    distances: tuple[DistanceFigure, ...] = ()
    turned: tuple[TurnedFigure, ...] = ()
    permuted: tuple[PermutedFigure, ...] = ()
    counted: tuple[float, ...] = ()
    chosen: tuple[ChosenRows, ...] = ()
    at_once: tuple[str, ...] = ()
    single: float | None = None
    single_line: str | None = None
    undefined: str | None = None
