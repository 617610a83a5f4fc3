"""Measurements of layers and modules, and of the function that the models compute."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class ReluFacts:
    """Outputs of a ReLU."""

    dead: float  # Fraction of units that are 0 for every sample
    varies: float  # Fraction of units whose input varies between samples
    rows: int  # Number of samples
    furthest: float  # Lowest mean input of a unit


@dataclass(frozen=True, kw_only=True)
class RouterFacts:
    """Load of the experts of a router."""

    experts: int  # Number of experts
    effective: float  # Effective number of experts: the exponential of the entropy of the load
    most: float  # Largest fraction of the load on one expert


@dataclass(frozen=True, kw_only=True)
class NormFacts:
    """A BatchNorm in one step: values per channel, samples, calls, and updates of its running statistics."""

    values: int = 0
    samples: int = 0
    calls: int = 0
    updates: int = 0
    momentum: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LayerGradient:
    """The root mean square gradient of a weight matrix of a module."""

    module: str
    size: float


@dataclass(frozen=True, kw_only=True)
class WrongAxes:
    """Calls at one place that treat axes, masks or noise wrongly."""

    # "reordered": a view is used instead of a transpose. "inverted": an attention mask hides everything except padding.
    # "softmax_over_batch": a softmax of three axes or more is over the first one.
    # "uniform_noise": noise is uniform instead of normal.
    kind: str
    module: str
    line: str | None
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class LayersFacts:
    """Measurements by path of the layer. ``depth`` is in forward order. ``is_fp16``: measured in float16."""

    experiment: ClassVar[str] = "layer_outputs"
    relus: dict[str, ReluFacts] = field(default_factory=dict)
    routers: dict[str, RouterFacts] = field(default_factory=dict)
    norms: dict[str, NormFacts] = field(default_factory=dict)
    depth: tuple[LayerGradient, ...] = ()
    is_fp16: bool = False
    dropout: dict[str, float] = field(default_factory=dict)
    inactive_dropout: dict[str, str | None] = field(
        default_factory=dict
    )  # Lines of dropouts that are off in train mode
    axes: tuple[WrongAxes, ...] = ()

    def wrong_axes(self, kind: str) -> list[WrongAxes]:
        return [each for each in self.axes if each.kind == kind]


@dataclass(frozen=True, kw_only=True)
class DropoutFacts:
    """The loss of one batch: the mean over eight dropout masks, and the value without strong dropout."""

    experiment: ClassVar[str] = "dropout_gap"
    with_dropout: float
    without: float


@dataclass(frozen=True, kw_only=True)
class SymmetryFacts:
    """For each weight, the fraction of rows that equal the first row both in the weight and in its gradient."""

    experiment: ClassVar[str] = "symmetry"
    alike: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class FirstLossFacts:
    """The loss of the first step, as recorded and with weights of the usual scale."""

    experiment: ClassVar[str] = "first_loss_rescaled"
    loss: float  # The recorded loss
    classes: int  # Number of classes
    input_size: float  # Largest root mean square of an input
    large: dict[str, float]  # For each weight that is too large, the factor by which it is divided
    rescaled: float  # The loss with these weights divided


@dataclass(frozen=True, kw_only=True)
class RepeatedModule:
    """A module that occurs ``times`` times in the container ``path``. ``is_chained``: each output is the next input."""

    path: str
    times: int
    is_chained: bool


@dataclass(frozen=True, kw_only=True)
class OutputSpread:
    """Difference of the outputs of a model between samples, relative to the size of the outputs."""

    step: int
    spread: float


@dataclass(frozen=True, kw_only=True)
class ModulesFacts:
    """All modules in the examined steps."""

    experiment: ClassVar[str] = "modules"
    looks: int  # Number of examined steps
    last: int  # The last examined step
    same_inputs: bool = False  # The inputs were the same in all examined steps
    constant: str | None = None  # The first module with equal outputs for unequal samples; None without one
    is_whole: bool = False  # The outputs of the full model are the same for every sample
    constant_kind: str = ""  # Class of ``constant``
    spreads: tuple[OutputSpread, ...] = ()  # Spread of vector outputs in steps whose loss uses no data but the inputs
    noisy: tuple[str, ...] = ()  # Frozen modules with dropout in train mode, called only without gradients
    drifting: tuple[str, ...] = ()  # Frozen modules in train mode whose running statistics are updated
    repeated: tuple[RepeatedModule, ...] = ()  # Modules that one container holds several times
    flat: str = ""  # The operation with derivative 0 everywhere that the graph of the loss contains
    behind_flat: tuple[str, ...] = ()  # Parameters that the loss reaches only through such operations


@dataclass(frozen=True)
class Deviation:
    """Change of outputs that should stay the same."""

    amount: float  # The change
    limit: float  # The largest change that rounding explains
    module: str | None = None  # Path of the first module whose output changed with unchanged input; None if unknown
    line: str | None = None  # Line in ``module`` that calls the first function whose result changed; None if unknown
    is_reordered: bool = False  # Each sample has the unchanged output of another sample

    @property
    def is_real(self) -> bool:
        return self.amount > self.limit


@dataclass(frozen=True)
class FunctionFacts:
    """The forward pass of one step in eval mode, replayed with one change at a time."""

    experiment: ClassVar[str] = "function"
    written: tuple[str, ...] = ()  # Buffers that a forward pass writes to
    neighbours: Deviation | None = None  # Deviation if other samples of the batch change; None if not measured
    are_graphs: bool = False  # The samples are graphs: an input numbers the graph of each node
    related: str = ""  # Reason why samples may depend on each other; "" without one
    is_batch: bool = False  # A loader confirms that the first dimension counts samples
    place: Deviation | None = None  # Deviation if the samples are in another order; None if not measured


MASK_OF_ONES = "a mask among the inputs that is 1 everywhere"


@dataclass(frozen=True)
class PaddedFacts:
    """The forward pass of one step in eval mode, replayed without the padding of a row."""

    experiment: ClassVar[str] = "padded"
    padding: Deviation | None = None  # Deviation of the outputs of this row; None if not measured
    pad: str = ""  # The declaration that identifies padding


@dataclass(frozen=True)
class InputsFacts:
    """The arguments of the model's forward pass, replayed with one change at a time."""

    experiment: ClassVar[str] = "inputs"
    arguments: int = 0  # Number of arguments whose rows differ
    without_effect: tuple[str, ...] = ()  # Arguments whose rows, in another order, change no bit of the outputs
    keeps_order: bool = True  # False: an attention model gives the same outputs for tokens in another order
    needs_order: bool = False  # If not ``keeps_order``: each token has an output, or the model has a position table
