"""A multi-layer perceptron. Shapes: B batch, K outputs; the input is any with sizes[0] numbers each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from trainwright.errors import UsageError, require_choice
from trainwright.models.options import require_dropout

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}


class MLP(nn.Module):
    """x -> logits_BK: flatten, then linear, activation, dropout per hidden size, then a linear ``head``."""

    def __init__(self, layers: OrderedDict[str, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(layers)

    def forward(self, x: Tensor) -> Tensor:
        logits_BK: Tensor = self.layers(x.flatten(1))
        return logits_BK


def mlp(*, sizes: Sequence[int], activation: str = "relu", dropout: float = 0.0) -> MLP:
    """Linear layers with an activation between them: x -> logits_BK. The input is flattened.

    Args:
        sizes: Number of features from input to output: ``[20, 64, 10]`` has one hidden layer.
        activation: ``relu``, ``gelu``, ``silu`` or ``tanh``.
        dropout: Dropout after each hidden layer.

    Raises UsageError for a value that cannot be used.
    """
    if len(sizes) < 2 or any(not isinstance(size, int) or size < 1 for size in sizes):
        raise UsageError(f"sizes must be two or more counts; got {sizes!r}", remedy="try sizes=[20, 64, 10]")
    require_choice("activation", activation, ACTIVATIONS)
    require_dropout(dropout)
    modules: OrderedDict[str, nn.Module] = OrderedDict()
    for index, (before, after) in enumerate(pairwise(sizes[:-1])):
        modules[f"linear{index}"] = nn.Linear(before, after)
        modules[f"activation{index}"] = ACTIVATIONS[activation]()
        if dropout:
            modules[f"dropout{index}"] = nn.Dropout(dropout)
    modules["head"] = nn.Linear(sizes[-2], sizes[-1])
    return MLP(modules)
