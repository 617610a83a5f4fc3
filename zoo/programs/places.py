"""Where techniques are put into a model, and how what it returns is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.nn import functional as F

from zoo.programs.training import Training


def bodies(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Linear layers within the model, the last one left out, by the module that holds them."""
    found = [
        (parent, name, child) for parent in model.modules() for name, child in parent.named_children()
        if isinstance(child, nn.Linear)
    ]  # fmt: skip
    yield from found[:-1]


def score(t: Training, out: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(out, y) if t.base == "regress" else F.cross_entropy(out, y)


def behind_first(t: Training, make: Callable[[int], nn.Module]) -> nn.Module:
    """Puts a module behind the first linear layer."""
    parent, name, layer = next(bodies(t.model))
    made = make(layer.out_features)
    setattr(parent, name, nn.Sequential(layer, made))
    return made
