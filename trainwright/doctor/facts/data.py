"""What is measured of the data: rows by their content, loaders, targets, and the inputs of replayed steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

SAME = 8
"""Steps in a row on the same batch: more than the updates that a loop makes on each batch."""
MOST_CLASSES = 128
"""Larger ones are not counted. Of more classes seldom all are used: vocabularies, pretrained heads."""


@dataclass(frozen=True, kw_only=True)
class EvaluatedRows:
    """Rows of an evaluation: ``distinct`` different ones, of which ``shared`` were trained on.

    ``trained`` rows were trained on so far. ``is_one_set``: they come from one loader or tensor. ``source`` is the line
    that calls the model.
    """

    rows: int
    distinct: int
    shared: int
    trained: int
    is_one_set: bool = True
    source: str | None = None

    @property
    def is_partial(self) -> bool:
        """Whether some of them and not all were trained on."""
        return self.is_one_set and 0.05 * self.distinct < self.shared < 0.95 * self.distinct


@dataclass(frozen=True, kw_only=True)
class RowsFacts:
    """The rows of the inputs of training, identified by their content. Steps after the 128th are sampled.

    Attributes:
        distinct: Different rows so far.
        new_lately: Fraction of rows in the last steps that had not been read before.
        batch: Rows of a call.
        same: The most steps in a row that read the rows of the step before, the last of them ``same_to``.
        same_before: The most in any other such run of steps.
        whole: Rows of the set that the batches come from; 0 if unknown.
        micro: The most micro-batches of a step that were all equal, in ``micro_steps`` steps.
        is_continuous: Two samples are never equal by chance.
        period: A batch is the one that came this many batches before, ``recurred`` times in a row.
        is_kept: These batches came from a shuffling loader, one by one, and are not fetched again.
        workers: Workers of a loader over an IterableDataset; 0 without one.
        groups: Groups of as many batches in a row, of which ``equal_groups`` have equal batches.
        source: The line that reads the newest loader.
        evaluated: Of the last evaluation the rows that overlap most.
    """

    experiment: ClassVar[str] = "rows"
    steps: int
    distinct: int = 0
    new_lately: float = 1.0
    batch: int = 0
    same: int = 0
    same_to: int = 0
    same_before: int = 0
    whole: int = 0
    micro: int = 0
    micro_steps: int = 0
    is_continuous: bool = True
    period: int = 0
    recurred: int = 0
    is_kept: bool = False
    workers: int = 0
    groups: int = 0
    equal_groups: int = 0
    source: str | None = None
    evaluated: EvaluatedRows | None = None


@dataclass(frozen=True, kw_only=True)
class EmptyLoader:
    """A loader that gave no batch in any of its ``epochs``. ``samples`` and ``length`` are None if unknown."""

    epochs: int
    samples: int | None
    batch_size: int | None
    drop_last: bool
    length: int | None


@dataclass(frozen=True, kw_only=True)
class EpochRepeat:
    """The first ``equal`` of ``batches`` batches of an epoch have the samples of the epoch before, in its order."""

    batches: int
    equal: int
    samples: int
    ascending: bool
    sampler: str
    random: bool
    distributed: bool


@dataclass(frozen=True, kw_only=True)
class LoaderOverlap:
    """A loader that was evaluated: its samples, and how many of them were trained on, by their positions."""

    samples: int
    shared: int
    trained: int
    same_loader: bool


@dataclass(frozen=True, kw_only=True)
class DrawnSamples:
    """The samples that a loader drew for training from a data set of ``samples``.

    Attributes:
        draws: Samples drawn so far, ``distinct`` of them different.
        same_set: The last two epochs drew the same samples, and left out more than an incomplete batch.
        chooses: The sampler is made for a part of the data set.
    """

    samples: int
    draws: int
    distinct: int
    same_set: bool
    chooses: bool
    sampler: str


@dataclass(frozen=True, kw_only=True)
class LoaderRestarts:
    """Iterators of a loader with ``workers`` worker processes, ``batches`` that all gave, ``length`` of an epoch."""

    workers: int
    iterators: int
    batches: int
    length: int | None


@dataclass(frozen=True, kw_only=True)
class StaleAttribute:
    """An attribute of a data set that changed after its persistent workers had copied it."""

    name: str
    before: str
    now: str
    step: int


@dataclass(frozen=True, kw_only=True)
class WorkerDraws:
    """What two workers read when each reads one sample twice, in two epochs. ``init``: there is a worker_init_fn.

    ``with_seeds``: equal even where each worker seeds its generators from ``torch.initial_seed()``; None: not tried.
    """

    workers: int
    init: bool
    random: bool
    equal_workers: bool
    equal_epochs: bool
    with_seeds: bool | None = None


@dataclass(frozen=True, kw_only=True)
class LoadersFacts:
    """The DataLoaders of the process.

    ``entropies`` are those of the labels of each batch; ``mixed`` the lowest and the mean entropy of batches drawn at
    random. ``ascending``: training reads the data set in its order. ``source``: the line that reads its loader.
    """

    experiment: ClassVar[str] = "loaders"
    source: str | None = None
    empty: tuple[EmptyLoader, ...] = ()
    repeats: tuple[EpochRepeat, ...] = ()
    overlaps: tuple[LoaderOverlap, ...] = ()
    drawn: tuple[DrawnSamples, ...] = ()
    restarts: tuple[LoaderRestarts, ...] = ()
    stale: StaleAttribute | None = None
    workers: WorkerDraws | None = None
    entropies: tuple[float, ...] = ()
    mixed: tuple[float, ...] = ()
    ascending: bool = False


@dataclass(frozen=True, kw_only=True)
class TargetsFacts:
    """The ``targets`` of a loss over classes in sampled steps, with the ``smallest`` and the ``largest`` class.

    Attributes:
        lowest: The lowest target of a binary loss.
        highest: The highest.
        counts: How often each class was a target, up to the largest that was: of one target for each row of the input.
        rows: Rows of the inputs that these targets belong to; those that came again are counted again.
        most: The most targets of one class in one call.
        ids: The largest value of each integer input.
    """

    experiment: ClassVar[str] = "targets"
    targets: int
    largest: int
    smallest: int = 0
    lowest: float = 0.0
    highest: float = 1.0
    counts: tuple[int, ...] = ()
    rows: int = 0
    most: int = 0
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class InputSpread:
    """One input of a model. ``mean``, ``std`` and ``absmax`` are None unless it has a floating dtype."""

    shape: tuple[int, ...]
    constant: bool
    mean: float | None = None
    std: float | None = None
    absmax: float | None = None
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class LeakingColumn:
    """A column of the input with the fraction of its variance that is left within the classes of ``samples``."""

    column: int
    within: float
    samples: int


@dataclass(frozen=True, kw_only=True)
class PaddedIds:
    """The id that pads rows at their ``side``: its fraction of all ids, and of the rows that have some."""

    id: int
    side: str
    rows: float
    fraction: float


@dataclass(frozen=True, kw_only=True)
class BatchFacts:
    """Inputs and targets of a recorded step. ``entropy`` is that of the ``samples`` labels; None for numbers.

    ``offsets``: by cross-entropy over tokens, how many positions after its prediction the target is in the input.
    """

    experiment: ClassVar[str] = "batch"
    inputs: tuple[InputSpread, ...] = ()
    targets_vary: bool = False
    classes: int | None = None
    samples: int = 0
    entropy: float | None = None
    leaks: tuple[LeakingColumn, ...] = ()
    padding: PaddedIds | None = None
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PaddingFacts:
    """The gradient of the loss at outputs deep within the padding, and elsewhere."""

    experiment: ClassVar[str] = "padding_in_loss"
    padding: PaddedIds
    at_padding: float
    elsewhere: float


@dataclass(frozen=True, kw_only=True)
class StandardizedFacts:
    """The losses of updates on one batch: with its inputs unchanged, and standardized."""

    experiment: ClassVar[str] = "standardized"
    unchanged: tuple[float, ...]
    standardized: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class LabelSignalFacts:
    """How far simple learners predict held-out labels above chance, in standard deviations.

    ``memorized`` are the losses of the model when it is trained on one batch.
    """

    experiment: ClassVar[str] = "label_signal"
    samples: int
    deviations: float
    memorized: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class TextEnds:
    """The id that pads texts, and how often it ends one.

    Attributes:
        id: The token.
        within: After a target, with other tokens behind it.
        attended: The first of the padding, after a target, where an attention mask counts it.
        targets: How often it is a target.
        rows: Rows of the batch.
    """

    id: int
    within: int
    attended: int
    targets: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """A cross-entropy over the tokens of an input.

    Attributes:
        offset: The targets are the tokens so many places on; None where none fits.
        fraction: The fraction of the targets that are.
        sees: Change of scores where only tokens from ``start`` on change, in standard deviations; None: unknown.
        given: The same of the scores at ``start``.
        ends: The token that ends texts.
    """

    offset: int | None
    fraction: float
    sees: float | None = None
    given: float | None = None
    start: int = 0
    ends: TextEnds | None = None


@dataclass(frozen=True, kw_only=True)
class TokensFacts:
    """The cross-entropies over tokens of a step."""

    experiment: ClassVar[str] = "tokens"
    losses: tuple[TokenLoss, ...] = ()
