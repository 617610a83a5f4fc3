"""What is measured of the data: rows by their content, samples by their number, features by their scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

SAME = 8
"""Steps in a row on the same batch that are no chance, and no few updates on each batch."""

PIXELS = 2
"""By which one side of all pictures may differ for a bound that is off: another size changes both sides, or by more."""


@dataclass(frozen=True, kw_only=True)
class EvaluatedPart:
    """The rows of an evaluation that come from one data source, such as one pass over a loader.

    Of ``rows`` so many are ``distinct``, and so many of these are ``shared`` with training: they were trained on before
    the evaluation. In ``mixed`` of the ``calls`` a tenth of the rows or more was trained on, and a tenth or more was
    not. ``has_source``: the loader, or the tensor that the rows are a part of, is known.
    """

    calls: int
    rows: int
    distinct: int
    shared: int
    mixed: int
    has_source: bool


@dataclass(frozen=True, kw_only=True)
class EvaluatedRows:
    """An evaluation: after which step, how many calls and rows, and how many rows are distinct.

    ``again`` are rows that an earlier evaluation had read. ``trained``: how many distinct rows had been trained on.
    """

    step: int
    calls: int
    rows: int
    digest: int
    again: int = 0
    distinct: int = 0
    trained: int = 0
    parts: tuple[EvaluatedPart, ...] = ()


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
class SharedSamplesFacts:
    """A validation set beside the training set of a run, as data sets: ``by`` position in one data set, or by content.

    Of its ``samples`` so many were ``compared``, and ``shared`` of these are among the ``trained_compared`` of the
    ``trained`` samples. ``by_chance`` of them may be equal by chance.
    """

    experiment: ClassVar[str] = "shared_samples"
    by: str
    samples: int
    compared: int
    shared: int
    trained: int
    trained_compared: int
    by_chance: float = 0.0

    @property
    def share(self) -> float:
        """Of the validation set, scaled up by the part of the training set that was compared."""
        covered = self.trained_compared / max(1, self.trained)
        return min(1.0, self.shared / max(1, self.compared) / max(covered, 1e-9))


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
    """One evaluation, after step ``after``: the calls of the model whose outputs were compared with targets.

    ``rows`` is the number of rows of all ``calls``, ``losses`` are the means over a batch that loss functions returned.
    ``likeness`` is that of the first floating-point input, ``further`` those of others. ``chosen``: the rows of outputs
    that this evaluation and those before it have chosen, each choice once.
    """

    experiment: ClassVar[str] = "evaluation"
    after: int
    calls: int
    rows: int
    losses: tuple[float, ...] = ()
    likeness: Likeness | None = None
    further: tuple[Likeness, ...] = ()
    chosen: tuple[ChosenRows, ...] = ()
