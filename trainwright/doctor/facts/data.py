"""Measurements of data: rows by their content, loaders, targets, and the inputs of replayed steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

MIN_SAME_STEPS = 8  # Consecutive steps on one batch that count as repetition. Loops may make several updates per batch


MIN_COPIED_ROWS = 8  # Minimum number of different rows that occur several times in an evaluation and were trained on


@dataclass(frozen=True, kw_only=True)
class EvaluatedRows:
    """Rows of one evaluation."""

    rows: int  # Number of rows
    distinct: int  # Number of different rows
    shared: int  # Number of different rows that were trained on
    trained: int  # Number of different rows in training so far
    repeated: int = 0  # Number of different rows that occur more than once
    shared_repeated: int = 0  # Number of these that were trained on
    parts: int = 0  # Number of time steps that were read, if the rows may be windows of a series
    moved_parts: int = 0  # Number of these that are in training windows, too, at another place
    is_one_set: bool = True  # All rows come from one loader or tensor
    source: str | None = None  # Line that calls the model

    @property
    def is_partial(self) -> bool:
        """Returns True if some of the rows, but not all, were trained on."""
        return self.is_one_set and 0.05 * self.distinct < self.shared < 0.95 * self.distinct

    @property
    def has_copies(self) -> bool:
        """Returns True if the rows that occur several times were trained on, and hardly any of the others."""
        others, shared = self.distinct - self.repeated, self.shared - self.shared_repeated
        return 0.9 * self.repeated <= self.shared_repeated >= MIN_COPIED_ROWS and shared < 0.25 * others


@dataclass(kw_only=True)
class RowsFacts:
    """The rows of the inputs of training, identified by their content. Steps after the 128th are sampled."""

    experiment: ClassVar[str] = "rows"
    steps: int = 0  # Steps so far
    distinct: int = 0  # Number of different rows so far
    new_lately: float = 1.0  # Fraction of rows in the last steps that had not been read before
    batch: int = 0  # Rows in one call
    same: int = 0  # Length of the longest run of steps that read the rows of the previous step
    same_to: int = 0  # Last step of that run
    same_before: int = 0  # Length of the second longest such run
    whole: int = 0  # Rows of the dataset or tensor that the batches come from; 0 if unknown
    unread: str = ""  # If ``whole`` is unknown: a variable of the loop that yields such batches and is never read
    micro: int = 0  # The most micro-batches of one step that were all equal
    micro_steps: int = 0  # Number of steps with equal micro-batches
    is_continuous: bool = True  # The values are such that two samples are never equal by chance
    are_codes: bool = False  # A row has one integer in each input, such as a user and an item
    period: int = 0  # Each batch equals the one this many batches earlier
    recurred: int = 0  # Number of consecutive batches for which this holds
    is_kept: bool = False  # The batches of a shuffling loader are held by the loop, not fetched again
    workers: int = 0  # Worker processes of a loader over an IterableDataset; 0 without one
    groups: int = 0  # Number of groups of ``workers`` consecutive batches
    equal_groups: int = 0  # Number of groups in which all batches are equal
    source: str | None = None  # Line that reads the newest loader
    evaluated: EvaluatedRows | None = None  # Of the sets in the last evaluation, the one that overlaps most


@dataclass(frozen=True, kw_only=True)
class SplitsFacts:
    """Columns of the first input of the newest evaluation."""

    experiment: ClassVar[str] = "splits"
    rows: int = 0  # Evaluated rows
    columns: int = 0  # Columns that vary
    standardized: int = 0  # Columns with mean 0 and deviation 1 over exactly these rows
    gapless: int = 0  # Columns of integer codes without a gap, whose highest code is below that of training
    gaps: float = 0.0  # Expected number of gaps in these columns, by the frequencies of the codes in training
    beyond: float = 0.0  # Expected number of higher codes that occur, if all of several columns have no gap
    scales: tuple[str, ...] = ()  # Names of the scales of training inputs and evaluated inputs, if they differ
    source: str | None = None  # Line that calls the model


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
    """An epoch that begins with the samples of the previous epoch in the same order."""

    batches: int  # Batches of the epoch
    equal: int  # Number of leading batches that are equal
    samples: int  # Samples in these batches
    ascending: bool  # The positions of the samples ascend
    sampler: str  # Class of the sampler
    random: bool  # The sampler draws at random
    distributed: bool  # The sampler is a DistributedSampler


@dataclass(frozen=True, kw_only=True)
class LoaderOverlap:
    """Samples of a loader that was evaluated, by their position in the dataset."""

    samples: int  # Evaluated samples
    shared: int  # Number of these that were trained on
    trained: int  # Samples of the dataset that were trained on
    same_loader: bool  # The loader also yields training batches


@dataclass(frozen=True, kw_only=True)
class DrawnSamples:
    """Samples that a loader drew for training."""

    samples: int  # Length of the dataset
    draws: int  # Samples drawn so far
    distinct: int  # Number of different samples among them
    same_set: bool  # The last two epochs drew the same samples, and left out more than an incomplete batch
    chooses: bool  # The sampler is meant to draw only a part of the dataset
    sampler: str  # Class of the sampler


@dataclass(frozen=True)
class LoaderRestarts:
    """Iterators that were made of one loader with worker processes."""

    workers: int  # Worker processes
    iterators: int  # Number of iterators
    batches: int  # Batches from all of them
    length: int | None  # Batches of an epoch; None if unknown


@dataclass(frozen=True, kw_only=True)
class WorkerDraws:
    """An experiment: two workers each read one sample twice, in two epochs."""

    workers: int  # Worker processes of the loader
    init: bool  # The loader has a ``worker_init_fn``
    random: bool  # The two reads by one worker differ
    equal_workers: bool  # Both workers read equal samples
    equal_epochs: bool  # Both epochs read equal samples
    with_seeds: bool | None = None  # The reads are equal even with ``torch.initial_seed()``; None: not measured


@dataclass(frozen=True, kw_only=True)
class LoadersFacts:
    """The DataLoaders of the process."""

    experiment: ClassVar[str] = "loaders"
    source: str | None = None  # Line that reads the training loader
    empty: tuple[EmptyLoader, ...] = ()  # Loaders that yielded no batch
    repeats: tuple[EpochRepeat, ...] = ()  # Epochs in the order of the previous one
    overlaps: tuple[LoaderOverlap, ...] = ()  # Loaders of evaluations that share samples with training
    drawn: tuple[DrawnSamples, ...] = ()  # Samples drawn for training, for each loader
    restarts: tuple[LoaderRestarts, ...] = ()  # Loaders whose workers are started often
    workers: WorkerDraws | None = None  # Random numbers of the workers
    entropies: tuple[float, ...] = ()  # Entropy of the labels of each batch, in nats
    mixed: tuple[float, ...] = ()  # Lowest and mean entropy of batches drawn at random, in nats
    ascending: bool = False  # Training reads the dataset in its order


@dataclass(kw_only=True)
class SamplesFacts:
    """Samples that were read again, compared with their earlier values, and inputs that a step wrote to."""

    experiment: ClassVar[str] = "samples"
    written: int = 0  # Number of steps that changed the model's input in place
    written_views: int = 0  # Number of these in which the input was a view of a larger tensor
    since_written: int = 0  # The first of these steps
    changed: int = 0  # Number of changed samples if one ``a * x + b`` per element explains all of them, else 0
    factor: float = 1.0  # The median of ``a``
    since_changed: int = 0  # The first step with such a change
    apart: int = 0  # Samples whose input and target were flipped or turned in different ways
    together: int = 0  # Samples whose input and target were flipped or turned in the same way, or both unchanged
    since_apart: int = 0  # The first step with ``apart``
    source: str | None = None  # Line that reads their loader


@dataclass(frozen=True, kw_only=True)
class TargetsFacts:
    """Targets of losses over classes in sampled steps."""

    experiment: ClassVar[str] = "targets"
    targets: int  # Number of targets
    largest: int  # Largest class among them
    lowest: float = 0.0  # Lowest target of a binary loss
    highest: float = 1.0  # Highest target of a binary loss
    ascending: int = 0  # The most steps in a row without a label below one of the step before
    ends: tuple[int, ...] = ()  # End-of-text ids, from attributes (``eos_token_id``) of objects of the loop or loaders


@dataclass(frozen=True, kw_only=True)
class InputSpread:
    """One input of a model. ``mean``, ``std`` and ``absmax`` are None unless it has a floating dtype."""

    shape: tuple[int, ...]
    constant: bool
    mean: float | None = None
    std: float | None = None
    absmax: float | None = None


@dataclass(frozen=True, kw_only=True)
class LeakingColumn:
    """An input column that reveals the label: ``within`` is the fraction of its variance that is within classes."""

    column: int
    within: float
    samples: int
    is_copy: bool = False  # The column equals one of several columns of the target


@dataclass(frozen=True, kw_only=True)
class PaddedIds:
    """The id that pads rows."""

    id: int
    fraction: float  # Fraction of all ids that are padding


@dataclass(frozen=True, kw_only=True)
class BatchFacts:
    """Inputs and targets of a recorded step."""

    experiment: ClassVar[str] = "batch"
    inputs: tuple[InputSpread, ...] = ()  # Distribution of each input
    targets_vary: bool = False  # The targets are not all equal
    classes: int | None = None  # Number of classes; None for targets that are not classes
    samples: int = 0  # Number of labels
    entropy: float | None = None  # Entropy of the labels in nats; None for targets that are not classes
    leaks: tuple[LeakingColumn, ...] = ()  # Input columns that reveal the label
    padding: PaddedIds | None = None  # The id that pads rows
    nodes: int = 0  # Nodes of all graphs of the batch, if it has several with edges; else 0
    reached: int = 0  # The largest node that an edge names, plus 1
    crossing: float = 0.0  # Fraction of these edges that connect nodes of different graphs
    scrambled: str = ""  # Order of axes that makes the pictures smoother than the present one; "" without such an order
    offsets: tuple[int, ...] = ()  # For each cross-entropy over tokens, the distance from prediction to target


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
    """Predictability of the labels."""

    experiment: ClassVar[str] = "label_signal"
    samples: int  # Number of samples
    deviations: float  # Correlation of learned scores with held-out labels, in standard deviations above chance
    memorized: tuple[float, ...]  # Losses of the model when it is trained on one batch


@dataclass(frozen=True, kw_only=True)
class TextEnds:
    """Uses of the token id that pads texts."""

    id: int  # The token id
    within: int  # Number of times that the id follows a target and precedes other tokens
    attended: int  # Rows whose first padding follows a target and is kept by the attention mask
    targets: int  # Number of times that the id is a target
    rows: int  # Rows of the batch
    is_end: bool = False  # The configuration of the model names it as the end of texts
    begins: bool = False  # Most rows begin with it


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """A cross-entropy over the tokens of an input."""

    offset: int | None  # Each target is the input token this many positions later; None if no offset fits
    fraction: float  # Fraction of the targets for which this holds
    sees: float | None = None  # Change of scores before ``start`` if tokens from ``start`` on change, in std deviations
    given: float | None = None  # Change of scores at ``start`` in the same experiment
    start: int = 0  # The first changed position
    module: str | None = None  # Path of the first module that depends on later tokens; None if unknown
    line: str | None = None  # Line in ``module`` that calls the first such function; None if unknown
    ends: TextEnds | None = None  # The token that ends texts


@dataclass(frozen=True, kw_only=True)
class TokensFacts:
    """Cross-entropies over tokens in one step."""

    experiment: ClassVar[str] = "tokens"
    losses: tuple[TokenLoss, ...] = ()
