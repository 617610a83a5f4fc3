"""Follows the running statistics of normalizations from look to look, until they have moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainwright.doctor.facts.layers import StandingNorm
from trainwright.recorder.user_types import Args, Kwargs
from trainwright.replay.functions import argument

BY_BATCH = {"batch_norm": ("training", False), "instance_norm": ("use_input_stats", True)}
"""The functions, and the sixth argument, which makes each normalise by the batch, with its default."""
ROWS, PLACES = 8, 16
"""Of an input so many samples, and of each about so many places, evenly spread, are read."""
SHIFT = 1e-3
"""Of its deviation: how far the mean of an input must be from that of the first look for other statistics."""


@dataclass
class _Norm:
    """The statistics before the first forward pass that was looked at, and the input of this pass.

    ``others``: looks at a further input with the same statistics.
    """

    statistics: Tensor
    mean: Tensor
    deviation: Tensor
    op: str
    since: int = 0
    others: int = 0
    shift: float = 0.0
    momentum: float = 0.0
    is_given: bool = False


class RunningStatistics:
    """A norm whose statistics have moved is followed no more: in most programs the second look is the last.

    ``modules`` are those of the model by path, ``owned`` the ids of the parameters that an optimizer has.
    """

    def __init__(self, modules: Mapping[str, nn.Module], owned: set[int]) -> None:
        self._modules, self._owned = modules, owned
        self._followed = {path for path, module in modules.items() if _statistics(module) is not None}
        self._norms: dict[str, _Norm] = {}
        self._before: dict[str, Tensor] = {}  # of the first call in this step
        self._noted: set[str] = set()

    def entered(self, path: str, module: nn.Module) -> None:
        """A module is called: the call may write to its statistics."""
        if path in self._followed and module.training and path not in self._before:
            statistics = _statistics(module)
            if statistics is None:
                self._let_go(path)
            else:
                self._before[path] = torch.cat([each.flatten() for each in statistics])

    def note(self, path: str, name: str, args: Args, kwargs: Kwargs) -> None:
        """A torch function was called by the module ``path``: only the first that normalises by the batch counts."""
        is_norm = name in BY_BATCH and path in self._before and path not in self._noted
        if not is_norm or not argument(args, kwargs, 5, *BY_BATCH[name]):
            return
        self._noted.add(path)
        x, before, known = args[0].detach(), self._before[path], self._norms.get(path)
        if not self._is_trained(path) if known is None else _differ(before, known.statistics):
            self._let_go(path)
            return
        places = x[:ROWS, :, None].flatten(2)
        part = places[..., :: max(1, places.shape[2] // PLACES)].float()
        variance, mean = torch.var_mean(part, (0, 2), correction=0)
        if known is None:
            self._norms[path] = _Norm(before, mean, variance.sqrt(), name)
            return
        shift = float(((mean - known.mean).abs() / known.deviation.clamp(min=1e-12)).amax())
        known.others += shift > SHIFT
        known.shift = max(known.shift, shift)
        known.momentum = float(argument(args, kwargs, 6, "momentum", 0.1) or 0.0)
        known.is_given = argument(args, kwargs, 1, "running_mean", None) is self._modules[path].running_mean

    def ended(self, step: int) -> None:
        """The step is over."""
        for norm in self._norms.values():
            norm.since = norm.since or step
        self._before.clear()
        self._noted.clear()

    def facts(self) -> dict[str, StandingNorm]:
        """The norms whose statistics have stood still, whatever they were given."""
        return {
            path: StandingNorm(
                op=norm.op,
                since=norm.since,
                others=norm.others,
                shift=norm.shift,
                momentum=norm.momentum,
                is_given=norm.is_given,
            )
            for path, norm in self._norms.items()
            if norm.others
        }

    def _let_go(self, path: str) -> None:
        self._followed.discard(path)
        self._norms.pop(path, None)

    def _is_trained(self, path: str) -> bool:
        """Whether an optimizer has it, or, where it has no weights, the smallest module around it that has any."""
        while path and not any(True for _ in self._modules[path].parameters()):
            path = path.rpartition(".")[0]
        return any(p.requires_grad and id(p) in self._owned for p in self._modules[path].parameters())


def _differ(one: Tensor, other: Tensor) -> bool:
    return one.device != other.device or not one.equal(other)


def _statistics(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    mean, variance = (getattr(module, name, None) for name in ("running_mean", "running_var"))
    if mean is None or variance is None or mean.is_meta or not mean.is_floating_point():
        return None
    return mean.detach(), variance.detach()
