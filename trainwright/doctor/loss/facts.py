"""What was measured where a loss is computed, on the arguments of the function that compares with targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class ComparedFacts:
    """One call of a loss function. Its value, and what it would be of other predictions.

    ``blank``: of predictions that are 0 (probabilities: all the same), or of classes what those are that the loop makes
    of outputs of 0 where that is more. ``constant``: of the best prediction that is the
    same for all ``targets``. ``bound`` is the function that bounds the prediction, and ``outside`` the share of targets
    that it cannot reach. ``smoothed``: where targets are smoothed, the lowest value there is, and that of equal shares.
    ``swapped``: the target has a graph and the prediction has none. ``itself``: both have the same values.
    ``mass``: how far probabilities add up to another sum than 1; ``weighed``: such that do are weighed by themselves.
    ``made``: the target is another with other weights, so it is none that data bring. ``of_distances``: the prediction
    is made of sums of squares.
    """

    op: str
    module: str | None
    value: float
    blank: float
    constant: float
    targets: int
    bound: str = ""
    outside: float = 0.0
    swapped: bool = False
    itself: bool = False
    smoothed: tuple[float, float] = (0.0, 0.0)
    bounded: tuple[float, float] = (0.0, 0.0)
    mass: float = -1.0
    weighed: bool = False
    made: bool = False
    of_distances: bool = False


@dataclass(frozen=True)
class SummedTerm:
    """A term of the loss that is a sum over so many targets, beside one that is a mean."""

    op: str
    targets: int


@dataclass(frozen=True)
class DividedTerm:
    """A term of the loss that is a mean and is divided by the number of samples again, beside one that is not."""

    op: str
    samples: int


@dataclass(frozen=True)
class ImpliedFacts:
    """A term that is made of the logarithm of a sigmoid of scores: its value, and that of outputs of 0."""

    op: str
    value: float
    blank: float


@dataclass(frozen=True)
class ComparisonsFacts:
    """Of every call in one step. ``added``: the function that an output plus targets goes into. ``rows``: to so many
    numbers, one of each row, a sum over all rows is added. ``implied``: terms whose targets stand in the formula.
    """

    experiment: ClassVar[str] = "comparisons"
    calls: tuple[ComparedFacts, ...] = ()
    summed: SummedTerm | None = None
    added: str = ""
    divided: DividedTerm | None = None
    rows: int = 0
    implied: tuple[ImpliedFacts, ...] = ()


@dataclass(frozen=True)
class Learned:
    """One call of a loss function in several steps, with the weights of the last. Means of its values.

    ``gained`` is the share of the loss of the best constant prediction that it lies below that; ``told`` that by which
    it rises with shuffled targets. ``error`` is the standard error of the less certain of the two, ``told_error`` of
    the latter. A step has ``targets`` of it, of ``classes`` (0: no classes). ``own_way``: on the way to the prediction
    stands a Function of the user's own, which may turn the gradient round.
    """

    op: str
    module: str | None
    value: float
    constant: float
    shuffled: float
    gained: float
    told: float
    error: float
    told_error: float = 0.0
    targets: int = 0
    classes: int = 0
    own_way: bool = False


@dataclass(frozen=True)
class LearnedFacts:
    """Of the calls whose targets vary, in ``steps`` steps.

    ``drawn``: the step draws samples of the model's own, as a policy does.
    """

    experiment: ClassVar[str] = "learned"
    steps: int
    calls: tuple[Learned, ...] = ()
    drawn: bool = False


@dataclass(frozen=True)
class RoomFacts:
    """The mean loss ``name`` of the last batches up to step ``until``, ``before`` the steps since ``since``, ``after``
    these, and after these with no other term of the loss: ``alone``, which is ``surely`` less. ``other`` is the term
    with the largest ``weight``.
    """

    experiment: ClassVar[str] = "room"
    since: int
    until: int
    name: str
    other: str
    weight: float
    before: float
    after: float
    alone: float
    surely: bool


@dataclass(frozen=True)
class PairedInput:
    """By what share of the loss it rises where the rows of one input are in another order, with its standard error.
    ``related``: by what share it changes then with other weights. ``square``: an output of the call has a number for
    each pair of rows.
    """

    rise: float
    error: float
    related: float
    square: bool = False


@dataclass(frozen=True)
class PairsFacts:
    """Of the inputs in ``steps`` steps that have a row for each sample, with the weights of the last. ``constant`` is
    the loss with one row of each input in place of all, the least of several.
    """

    experiment: ClassVar[str] = "pairs"
    steps: int
    loss: float
    constant: float
    inputs: tuple[PairedInput, ...] = ()
    num_optimizers: int = 1


@dataclass(frozen=True)
class TowardsPass:
    """The same of the loss of one backward pass, which trains all models whose outputs it is computed of."""

    before: float
    after: float


@dataclass(frozen=True)
class TowardsFacts:
    """The loss of a step, and what it is when every prediction moves a little towards its target.

    ``rivals``: there are several models or optimizers, of which one may want the other's loss to rise; ``own`` are the
    passes of which this is not so. ``reached``: backward gives a comparison with targets a gradient other than 0.
    ``maximises``: the optimizers raise what they are given.
    """

    experiment: ClassVar[str] = "towards_targets"
    before: float
    after: float
    ops: tuple[str, ...] = ()
    rivals: bool = False
    own: tuple[TowardsPass, ...] = ()
    reached: bool = False
    maximises: bool = False


@dataclass(frozen=True)
class AtTargetsFacts:
    """Of the ``terms`` that compare the prediction of ``op`` with the same targets: their sum where the prediction is
    right (the least of several that are more and more sure), and the least and the ``most`` of it ``elsewhere``.
    """

    experiment: ClassVar[str] = "at_targets"
    op: str
    terms: tuple[str, ...]
    right: float
    elsewhere: float
    what: str
    most: float


@dataclass(frozen=True)
class LargerOutputsFacts:
    """The loss of a step with all outputs of the models so many ``times`` as large, and the same of the other sign."""

    experiment: ClassVar[str] = "larger_outputs"
    times: tuple[float, ...]
    larger: tuple[float, ...]
    turned: tuple[float, ...]


@dataclass(frozen=True)
class DivergenceFacts:
    """A ``term`` that is made of the mean m and the deviation s of a normal sample alone, with all of them the same.

    ``is_sum``: of a function of either. Where it is ``of_mean`` m m / 2 + ``of_power`` s^``power`` / 2 - ``of_log``
    log s, but for a linear function of m and a constant, these; NaN, and power 0, where it is of no such form.
    ``deviation_learns``: the sample has a gradient for it.
    """

    experiment: ClassVar[str] = "divergence"
    term: str
    is_sum: bool
    of_mean: float
    of_power: float
    power: float
    of_log: float
    deviation_learns: bool


@dataclass(frozen=True)
class Rivalry:
    """A model (its number) that judges what another makes.

    From -1 to 1, where its outputs are pushed: by its own loss, of data and of what is made; and of that by the loss of
    the maker. ``apart``: how far, for the same output of the maker, what it is given in both passes is apart, over its
    size; what is done to the output on its way in both.
    """

    judge: int
    maker: int
    of_data: float
    of_made: float
    by_maker: float
    apart: float
    done: tuple[str, ...] = ()
    done_by_maker: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlayersFacts:
    """Of a step in which several models learn in turn."""

    experiment: ClassVar[str] = "players"
    rivalries: tuple[Rivalry, ...] = ()


@dataclass(frozen=True)
class SlopesFacts:
    """The losses of a step, and what they are where all derivatives by inputs, which they are made of, are so many
    ``times`` as large, and of the other sign (``turned``).
    """

    experiment: ClassVar[str] = "larger_slopes"
    times: float
    before: tuple[float, ...]
    after: tuple[float, ...]
    turned: tuple[float, ...]


@dataclass(frozen=True)
class TermRatio:
    """A term of the loss, its value for the batch twice over that of the batch, and the norm of its gradient."""

    name: str
    weight: float
    ratio: float
    size: float = 0.0


@dataclass(frozen=True)
class CutLoss:
    """A loss of the batch twice in place of once, in eval mode: 1 for a mean over samples, 2 for a sum.

    ``divides``: the loop divides by the number of samples, which stays that of one batch here.
    """

    ratio: float
    terms: tuple[TermRatio, ...] = ()
    divides: bool = False


@dataclass(frozen=True)
class CutFacts:
    """Of the loss of a step; of a game of the loss of each player."""

    experiment: ClassVar[str] = "batch_twice"
    losses: tuple[CutLoss, ...]


@dataclass(frozen=True)
class CountedFacts:
    """Of ``rows`` in the batch of a step, those for whose outputs the loss has no gradient but 0.

    ``are_samples``: a loader says that rows are samples. ``total`` is the sum of the first input. ``chosen``: of the
    idle rows those that have a gradient with larger, smaller or opposite outputs.
    """

    experiment: ClassVar[str] = "rows_that_count"
    rows: int
    idle: tuple[int, ...] = ()
    are_samples: bool = True
    total: float = 0.0
    chosen: tuple[int, ...] = ()


@dataclass(frozen=True)
class BaselineFacts:
    """A value that is predicted, its target, and the logarithms of what was drawn, which both have a part in weighing.

    From -1 to 1: how the derivative of the loss by such a logarithm changes where the target is larger (``by_target``),
    and where the prediction is (``by_prediction``).
    """

    experiment: ClassVar[str] = "baselines"
    by_target: float
    by_prediction: float
