"""Observes the running statistics of normalizations across examinations until they have moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainwright.doctor.facts.layers import StandingNorm
from trainwright.recorder.user_types import Args, Kwargs
from trainwright.replay.functions import argument

BATCH_STATISTICS_ARGUMENT = {"batch_norm": ("training", False), "instance_norm": ("use_input_stats", True)}
"""By function: the argument (the sixth) that enables batch statistics, and its default."""
SAMPLES_READ = 8
POSITIONS_READ = 16
"""Approximate number of evenly spread positions per sample that are read."""
MIN_MEAN_SHIFT = 1e-3
"""Minimum change of the input mean, in standard deviations, that should change the running statistics."""


@dataclass
class _Norm:
    """The statistics before the first examined forward pass, and the input of this pass.

    ``others``: examinations with other inputs and the same statistics.
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
    """Running statistics that may stand still. Normalizations whose statistics have moved are dropped.

    In most programs that happens at the second examination. ``modules`` are the modules by path, ``owned`` the ids of
    the parameters in an optimizer.
    """

    def __init__(self, modules: Mapping[str, nn.Module], owned: set[int]) -> None:
        self._modules, self._owned = modules, owned
        self._followed = {path for path, module in modules.items() if _statistics(module) is not None}
        self._norms: dict[str, _Norm] = {}
        self._before: dict[str, Tensor] = {}  # statistics before the first call in this step
        self._recorded: set[str] = set()

    def entered(self, path: str, module: nn.Module) -> None:
        """Called before a module, which may write to its statistics."""
        if path in self._followed and module.training and path not in self._before:
            statistics = _statistics(module)
            if statistics is None:
                self._let_go(path)
            else:
                self._before[path] = torch.cat([each.flatten() for each in statistics])

    def record(self, path: str, name: str, args: Args, kwargs: Kwargs) -> None:
        """Records a function call of the module ``path``. Only the first one that normalizes by the batch counts."""
        is_norm = name in BATCH_STATISTICS_ARGUMENT and path in self._before and path not in self._recorded
        if not is_norm or not argument(args, kwargs, 5, *BATCH_STATISTICS_ARGUMENT[name]):
            return
        self._recorded.add(path)
        x, before, known = args[0].detach(), self._before[path], self._norms.get(path)
        if not self._is_trained(path) if known is None else _differ(before, known.statistics):
            self._let_go(path)
            return
        places = x[:SAMPLES_READ, :, None].flatten(2)
        part = places[..., :: max(1, places.shape[2] // POSITIONS_READ)].float()
        variance, mean = torch.var_mean(part, (0, 2), correction=0)
        if known is None:
            self._norms[path] = _Norm(before, mean, variance.sqrt(), name)
            return
        shift = float(((mean - known.mean).abs() / known.deviation.clamp(min=1e-12)).amax())
        known.others += shift > MIN_MEAN_SHIFT
        known.shift = max(known.shift, shift)
        known.momentum = float(argument(args, kwargs, 6, "momentum", 0.1) or 0.0)
        known.is_given = argument(args, kwargs, 1, "running_mean", None) is self._modules[path].running_mean

    def ended(self, step: int) -> None:
        """Ends the step."""
        for norm in self._norms.values():
            norm.since = norm.since or step
        self._before.clear()
        self._recorded.clear()

    def facts(self) -> dict[str, StandingNorm]:
        """Returns the normalizations whose statistics did not change with any input."""
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
        """Returns True if an optimizer has its parameters, or those of the smallest enclosing module with
        parameters.
        """
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
