"""Measurements of data: rows by their content, loaders, targets, and the inputs of replayed steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

SAME = 8
"""Consecutive steps on one batch that count as repetition. Loops that update several times per batch do fewer."""


@dataclass(frozen=True, kw_only=True)
class EvaluatedRows:
    """Rows of one evaluation.

    Attributes:
        rows: Number of rows.
        distinct: Number of different rows.
        shared: Number of different rows that were trained on.
        trained: Number of different rows in training so far.
        is_one_set: All rows come from one loader or tensor.
        source: Line that calls the model.
    """

    rows: int
    distinct: int
    shared: int
    trained: int
    is_one_set: bool = True
    source: str | None = None

    @property
    def is_partial(self) -> bool:
        """Returns True if some of the rows, but not all, were trained on."""
        return self.is_one_set and 0.05 * self.distinct < self.shared < 0.95 * self.distinct


@dataclass(frozen=True, kw_only=True)
class RowsFacts:
    """The rows of the inputs of training, identified by their content. Steps after the 128th are sampled.

    Attributes:
        steps: Steps so far.
        distinct: Number of different rows so far.
        new_lately: Fraction of rows in the last steps that had not been read before.
        batch: Rows in one call.
        same: Length of the longest run of steps that read the rows of the previous step.
        same_to: Last step of that run.
        same_before: Length of the second longest such run.
        whole: Rows of the dataset or tensor that the batches come from; 0 if unknown.
        micro: The most micro-batches of one step that were all equal.
        micro_steps: Number of steps with equal micro-batches.
        is_continuous: The values are such that two samples are never equal by chance.
        period: Each batch equals the one this many batches earlier.
        recurred: Number of consecutive batches for which this holds.
        is_kept: These batches came from a shuffling loader one by one and are held by the loop, not fetched again.
        workers: Worker processes of a loader over an IterableDataset; 0 without one.
        groups: Number of groups of ``workers`` consecutive batches.
        equal_groups: Number of groups in which all batches are equal.
        source: Line that reads the newest loader.
        evaluated: Rows of the last evaluation that overlap most with training.
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
    """A loader that yielded no batch in any of its ``epochs``. ``samples`` and ``length`` are None if unknown."""

    epochs: int
    samples: int | None
    batch_size: int | None
    drop_last: bool
    length: int | None


@dataclass(frozen=True, kw_only=True)
class EpochRepeat:
    """An epoch that begins with the samples of the previous epoch in the same order.

    Attributes:
        batches: Batches of the epoch.
        equal: Number of leading batches that are equal.
        samples: Samples in these batches.
        ascending: The positions of the samples ascend.
        sampler: Class of the sampler.
        random: The sampler draws at random.
        distributed: The sampler is a DistributedSampler.
    """

    batches: int
    equal: int
    samples: int
    ascending: bool
    sampler: str
    random: bool
    distributed: bool


@dataclass(frozen=True, kw_only=True)
class LoaderOverlap:
    """A loader of an evaluation: the number of its samples, and of those that were trained on, by position."""

    samples: int
    shared: int
    trained: int
    same_loader: bool


@dataclass(frozen=True, kw_only=True)
class DrawnSamples:
    """Samples that a loader drew for training.

    Attributes:
        samples: Length of the dataset.
        draws: Samples drawn so far.
        distinct: Number of different samples among them.
        same_set: The last two epochs drew the same samples, and left out more than an incomplete batch.
        chooses: The sampler is meant to draw only a part of the dataset.
        sampler: Class of the sampler.
    """

    samples: int
    draws: int
    distinct: int
    same_set: bool
    chooses: bool
    sampler: str


@dataclass(frozen=True, kw_only=True)
class LoaderRestarts:
    """Iterators that were made of one loader with worker processes.

    Attributes:
        workers: Worker processes.
        iterators: Number of iterators.
        batches: Batches from all of them.
        length: Batches of an epoch; None if unknown.
    """

    workers: int
    iterators: int
    batches: int
    length: int | None


@dataclass(frozen=True, kw_only=True)
class StaleAttribute:
    """An attribute of a dataset that changed after persistent workers had copied the dataset."""

    name: str
    before: str
    now: str
    step: int


@dataclass(frozen=True, kw_only=True)
class WorkerDraws:
    """An experiment: two workers each read one sample twice, in two epochs.

    Attributes:
        workers: Worker processes of the loader.
        init: The loader has a ``worker_init_fn``.
        random: The two reads by one worker differ.
        equal_workers: Both workers read equal samples.
        equal_epochs: Both epochs read equal samples.
        with_seeds: The samples stay equal if each worker seeds its generators from ``torch.initial_seed()``; None if
            this was not measured.
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

    Attributes:
        source: Line that reads the training loader.
        empty: Loaders that yielded no batch.
        repeats: Epochs in the order of the previous one.
        overlaps: Loaders of evaluations that share samples with training.
        drawn: Samples drawn for training, for each loader.
        restarts: Loaders whose workers are started often.
        stale: A dataset attribute that workers do not see change.
        workers: Random numbers of the workers.
        entropies: Entropy of the labels of each batch, in nats.
        mixed: Lowest and mean entropy of batches drawn at random, in nats.
        ascending: Training reads the dataset in its order.
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
    """Targets of losses over classes in sampled steps.

    Attributes:
        targets: Number of targets.
        largest: Largest class among them.
        lowest: Lowest target of a binary loss.
        highest: Highest target of a binary loss.
    """

    experiment: ClassVar[str] = "targets"
    targets: int
    largest: int
    lowest: float = 0.0
    highest: float = 1.0


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
    """An input column that reveals the label: ``within`` is the fraction of its variance that is within classes."""

    column: int
    within: float
    samples: int


@dataclass(frozen=True, kw_only=True)
class PaddedIds:
    """The id that pads rows.

    Attributes:
        id: The id.
        rows: Fraction of the rows that contain padding.
        fraction: Fraction of all ids that are padding.
    """

    id: int
    rows: float
    fraction: float


@dataclass(frozen=True, kw_only=True)
class BatchFacts:
    """Inputs and targets of a recorded step.

    Attributes:
        inputs: Distribution of each input.
        targets_vary: The targets are not all equal.
        classes: Number of classes; None for targets that are not classes.
        samples: Number of labels.
        entropy: Entropy of the labels in nats; None for targets that are not classes.
        leaks: Input columns that reveal the label.
        padding: The id that pads rows.
        offsets: For each cross-entropy over tokens, the distance in the input from a prediction to its target.
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
    """The losses of repeated updates on one batch, with unchanged inputs and with standardized inputs."""

    experiment: ClassVar[str] = "standardized"
    unchanged: tuple[float, ...]
    standardized: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class LabelSignalFacts:
    """Predictability of the labels.

    Attributes:
        samples: Number of samples.
        deviations: Accuracy of simple learners on held-out labels above chance, in standard deviations.
        memorized: Losses of the model when it is trained on one batch.
    """

    experiment: ClassVar[str] = "label_signal"
    samples: int
    deviations: float
    memorized: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class TextEnds:
    """Uses of the token id that pads texts.

    Attributes:
        id: The token id.
        within: Number of times that it follows a target and precedes other tokens.
        attended: Number of rows in which it follows a target as the first padding token and the attention mask keeps
            it.
        targets: Number of times that it is a target.
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
        offset: Each target is the input token this many positions later; None if no offset fits.
        fraction: Fraction of the targets for which this holds.
        sees: Change of the scores before ``start`` when only tokens from ``start`` on change, in standard deviations;
            None if unknown.
        given: The same change at ``start``.
        start: The first changed position.
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
    """Cross-entropies over tokens in one step."""

    experiment: ClassVar[str] = "tokens"
    losses: tuple[TokenLoss, ...] = ()
