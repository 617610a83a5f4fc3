"""Chooses the linear layers of a model that low precision applies to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from trainwright.errors import UsageError, suggest

MAX_NAMES_SHOWN = 3


@dataclass(frozen=True)
class ChosenLayers:
    """Names of the chosen layers, and of the skipped ones by reason."""

    chosen: tuple[str, ...]
    left_out: dict[str, tuple[str, ...]]

    @property
    def total(self) -> int:
        """Number of linear layers of the model."""
        return len(self.chosen) + sum(map(len, self.left_out.values()))

    def reasons(self) -> Iterator[str]:
        """Yield a phrase for each reason, with names of the layers."""
        for why, names in self.left_out.items():
            shown = ", ".join(names[:MAX_NAMES_SHOWN]) + (", ..." if len(names) > MAX_NAMES_SHOWN else "")
            yield f"{why}: {shown}"


def choose_linear_layers(
    model: nn.Module, patterns: Sequence[str], *, key: str, multiples: tuple[int, int]
) -> ChosenLayers:
    """Choose the ``nn.Linear`` layers that match a pattern, and without patterns all but the first and the last.

    Args:
        model: The model; it is not changed.
        patterns: Names of layers, with wildcards.
        key: The recipe key of the patterns, for messages.
        multiples: Required divisors of ``in_features`` and ``out_features``.

    Raises:
        UsageError: A pattern matches no linear layer, or no layer is left.
    """
    layers = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in layers):
            raise UsageError(f"{key}: {pattern!r} matches no linear layer", remedy=suggest(pattern, list(layers)))
    left_out: dict[str, list[str]] = defaultdict(list)
    chosen = []
    for number, (name, layer) in enumerate(layers.items()):
        if patterns and not any(fnmatchcase(name, pattern) for pattern in patterns):
            left_out[f"not named by {key}"].append(name)
        elif not patterns and number in (0, len(layers) - 1):
            left_out["the first and the last layer"].append(name)
        elif layer.in_features % multiples[0] or layer.out_features % multiples[1]:
            left_out[f"dimensions that are no multiples of {max(multiples)}"].append(name)
        else:
            chosen.append(name)
    found = ChosenLayers(tuple(chosen), {why: tuple(names) for why, names in left_out.items()})
    if not chosen:
        raise UsageError(
            f"{key} leaves no layer: {'; '.join(found.reasons()) or 'the model has no nn.Linear'}",
            remedy=f"name layers of other sizes by {key}, or leave it out",
        )
    return found


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the submodule ``name`` by ``module``."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
