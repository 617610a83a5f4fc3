"""Constants of optimizers and modules that lie outside of the range that their definition or their use has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from torch import nn
from torch.optim import Optimizer

from trainwright.doctor.program.facts import ConstantsFacts, OddConstant
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.runlog.json_values import Facts, strict
from trainwright.state.names import named_modules

FIRST, SECOND = (0.0, 0.995), (0.8, 1.0)
"""Of the decays of two moments. A second moment over fewer than five steps is hardly one: the update becomes the sign
of the gradient. The first forgets sooner than the second, or what gradients no longer are divides their mean."""
OF_GROUPS: Mapping[str, tuple[float, float]] = {"momentum": (0.0, 0.9995), "alpha": (0.5, 1.0), "eps": (0.0, 1.0)}
"""Of an optimizer; ``alpha`` is the decay of RMSprop."""
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm)
LOOKED_AT: tuple[tuple[tuple[type[nn.Module], ...], str, float, float], ...] = (
    ((nn.LeakyReLU,), "negative_slope", 0.0, 0.99),
    (NORMS, "eps", 0.0, 0.1),
    ((nn.modules.batchnorm._BatchNorm,), "momentum", 1e-5, 0.95),
    ((nn.modules.dropout._DropoutNd,), "p", 0.0, 0.9),
)
"""Of modules. A slope of 1 and more is no kink, or amplifies what is negative; an eps of 1 is the variance of what is
normalised; a dropout of more than 0.9 leaves next to nothing."""
MOST = 8


class ConstantsProbe(Probe):
    """Looks at checkups."""

    name = ConstantsFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._subject = watched.subject
        self._told: ConstantsFacts | None = None

    def values(self) -> Facts | None:
        odd = [each for optimizer in self._subject.optimizers for each in _of_optimizer(optimizer)]
        odd += [each for path, module in named_modules(self._subject.roots) for each in _of_module(path, module)]
        facts = ConstantsFacts(len(self._subject.optimizers) + len(self._subject.modules), tuple(odd[:MOST]))
        if facts == self._told:
            return None
        self._told = facts
        return dict(strict(vars(facts)))


def _of_optimizer(optimizer: Optimizer) -> Iterator[OddConstant]:
    owner = type(optimizer).__name__
    seen: set[tuple[str, float]] = set()
    for group in optimizer.param_groups:
        betas = group.get("betas")
        known = {name: (group.get(name), *bounds) for name, bounds in OF_GROUPS.items()}
        if isinstance(betas, tuple | list) and len(betas) == 2:
            second = _number(betas[1])
            known |= {"betas[0]": (betas[0], FIRST[0], min(FIRST[1], second)), "betas[1]": (second, *SECOND)}
        for name, (value, low, high) in known.items():
            number = _number(value)
            if (number < low or number > high) and (name, number) not in seen:
                seen.add((name, number))
                yield OddConstant(owner, None, name, number, low, high)


def _of_module(path: str, module: nn.Module) -> Iterator[OddConstant]:
    for kinds, name, low, high in LOOKED_AT:
        number = _number(getattr(module, name, None)) if isinstance(module, kinds) else math.nan
        if number < low or number > high:
            yield OddConstant(type(module).__name__, path, name, number, low, high)


def _number(value: object) -> float:
    """NaN for what is none, such as a tensor."""
    return float(value) if isinstance(value, int | float) else math.nan
