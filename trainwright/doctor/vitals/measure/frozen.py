"""Finds weights that nobody trains though they are as fresh as from an initialisation."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from trainwright.doctor.vitals.facts import FrozenFacts, FrozenTensor
from trainwright.recorder.gradients import owned_by
from trainwright.recorder.program import tensors_of
from trainwright.recorder.user_types import Args, Kwargs
from trainwright.replay.experiments import experiment
from trainwright.replay.modules import ModuleStack
from trainwright.replay.replayer import Intervention
from trainwright.replay.scaled import as_if_trained
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts, strict

FEW, ENOUGH, MOST = 16, 64, 8
"""Elements of which anything, and of which a distribution can be told; tensors that are looked at."""
EDGE = 8
"""Of so few, the largest lies within this many times the bound over their number of it: 0.03 % of draws do not."""
CRITICAL = 1.36
"""Of Kolmogorov and Smirnov's statistic times the root of the number: 5 % of uniform draws lie above it."""
CRITICAL_FITTED = 1.19
"""The same where the deviation is that of the draws themselves."""
SAMPLE, SIDE = 4096, 128
"""Elements that are looked at; rows and columns of which singular values are taken."""
EVEN, ABOVE = 1e-3, 2.5
"""Relative: singular values of an orthogonal matrix are equal. How far the largest one of independent draws lies above
the sum of the roots of rows and columns, in the unit of Tracy and Widom's law: 0.2 % of draws lie beyond."""
BIAS = 1.01
"""Times the bound of torch's biases, which is that of its weights: 16-bit types round up."""


@experiment(FrozenFacts.experiment, when="requested", steps=3.0)
def frozen(session: ReplaySession) -> Facts:
    """The frozen matrices that look fresh, and what share of the gradient would be theirs if they were trained."""
    matrices = {name: p for name, p in session.parameters.items() if not p.requires_grad and p.dim() > 1}
    fresh = {name: p for name, p in matrices.items() if _is_fresh(p) and not _was_trained(session, p)}
    chosen = dict(list(fresh.items())[:MOST])
    if not chosen:
        return dict(strict(vars(FrozenFacts())))
    calls = _calls(session)
    sizes = _sizes(session, list(chosen.values()))
    whole, masked, trained_before = sum(sizes.values()), _masked(session), matrices.keys() - fresh.keys()
    rows = [
        FrozenTensor(
            name=name,
            is_zero=not bool(p.detach().any()),
            is_behind=not (calls.behind - calls.corrected - masked).isdisjoint(_holders(session, p)),
            is_last=calls.last in _holders(session, p),
            share=sizes.get(name, 0.0) / whole if whole else 0.0,
            is_meant=_is_orthogonal(p.detach().flatten(1).double())
            or _is_apart(session, p)
            or (bool(p.detach().any()) and _is_factor(session, name, trained_before)),
        )
        for name, p in chosen.items()
    ]
    return dict(strict(vars(FrozenFacts(tensors=tuple(rows)))))


def _is_apart(session: ReplaySession, parameter: Tensor) -> bool:
    """Whether it belongs to models of which nothing is trained, and to no optimizer: a loss made of random features."""
    if any(p is parameter for optimizer in session.optimizers for p in owned_by(optimizer)):
        return False
    roots = [root for root in session.roots if any(p is parameter for p in root.parameters())]
    return not any(p.requires_grad for root in roots for p in root.parameters())


def _is_factor(session: ReplaySession, name: str, trained_before: Set[str]) -> bool:
    """Whether the module around it, or the one around that, is an adapter: it holds what was trained before, too, and
    what is trained now.
    """
    path = name.rpartition(".")[0]
    for around in {path, path.rpartition(".")[0]} - {""}:
        own = {each: p for each, p in session.parameters.items() if each.startswith(f"{around}.")}
        if not trained_before.isdisjoint(own) and any(p.requires_grad for p in own.values()):
            return True
    return False


def _holders(session: ReplaySession, parameter: Tensor) -> set[str]:
    """The modules that have it: several where weights are tied."""
    return {
        path for path, module in session.modules.items() if any(own is parameter for own in module._parameters.values())
    }


def _was_trained(session: ReplaySession, parameter: Tensor) -> bool:
    """Whether a frozen bias beside it is larger than torch draws one: a short training shows there before it shows in
    the distribution of a matrix. Zeros, or one value for all as for a prior, are no sign of it.
    """
    if not bool(parameter.detach().any()):
        return False
    for path in _holders(session, parameter):
        own = [p for p in session.modules[path]._parameters.values() if p is not None and p.is_floating_point()]
        bound = max(_bound(p) for p in own if p.dim() > 1)
        biases = [p.detach() for p in own if p.dim() == 1 and p.numel() > 1 and not p.requires_grad]
        if any(float(p.abs().max()) > BIAS * bound and bool((p != p[0]).any()) for p in biases):
            return True
    return False


def _masked(session: ReplaySession) -> set[str]:
    """The modules with a frozen matrix and a trained one of its shape, such as a mask: one is learned for the other."""
    masked = set()
    for path, module in session.modules.items():
        own = [p for p in module._parameters.values() if p is not None and p.dim() > 1]
        trained = {p.shape for p in own if p.requires_grad}
        masked |= {path} if any(not p.requires_grad and p.shape in trained for p in own) else set()
    return masked


def _is_fresh(parameter: Tensor) -> bool:
    """All zeros, or as torch.nn.init draws weights: uniform, normal or orthogonal."""
    weight = parameter.detach()
    if weight.numel() < FEW or not parameter.is_floating_point():
        return False
    if not bool(weight.any()):
        return True
    flat = weight.flatten().double()
    return _is_uniform(flat[:: max(1, flat.numel() // SAMPLE)], parameter) or (
        flat.numel() >= ENOUGH and _is_as_random(weight)
    )


def _is_uniform(flat: Tensor, parameter: Tensor) -> bool:
    """Up to its largest element, as torch draws the weights of most of its layers."""
    usual, largest = _bound(parameter), float(flat.abs().max())
    if flat.numel() < ENOUGH and not usual * (1 - EDGE / flat.numel()) < largest <= usual * (1 + 1e-6):
        return False
    bound = usual if flat.numel() < ENOUGH else largest * (1 + 1 / flat.numel())
    return _distance((flat.sort().values / bound + 1) / 2) < CRITICAL


def _is_as_random(weight: Tensor) -> bool:
    """Orthogonal, or normal around 0 with the singular values of independent draws: training makes some large."""
    matrix = weight.flatten(1).double()
    rows, columns = (max(1, -(-size // SIDE)) for size in matrix.shape)
    part = matrix[::rows, ::columns]
    values, size = torch.linalg.svdvals(part), float(part.square().mean().sqrt())
    if part.shape == matrix.shape and _is_orthogonal(matrix):
        return True
    n, m = (math.sqrt(each) for each in part.shape)
    edge = n + m + ABOVE * (1 / n + 1 / m) ** (1 / 3) / 2
    at = (1 + torch.erf(part.flatten().sort().values / (size * math.sqrt(2)))) / 2
    return float(values[0]) < edge * size and _distance(at) < CRITICAL_FITTED


def _is_orthogonal(matrix: Tensor) -> bool:
    """Up to a factor."""
    if not 1 < min(matrix.shape) <= SIDE or not bool(matrix.any()):
        return False
    values = torch.linalg.svdvals(matrix)
    return float(values[-1]) > (1 - EVEN) * float(values[0])


def _distance(at: Tensor) -> float:
    """Kolmogorov and Smirnov's statistic of sorted probabilities, times the root of their number."""
    places = torch.arange(1, at.numel() + 1, dtype=torch.float64, device=at.device) / at.numel()
    return float((at - places).abs().max()) * math.sqrt(at.numel())


def _bound(weight: Tensor) -> float:
    """What torch draws the weights of its linear and convolutional layers up to."""
    return 1.0 / math.sqrt(weight.numel() // weight.shape[0])


@dataclass
class _Calls:
    """The calls of modules in a forward pass: which come behind what is trained, which is the last with weights, and
    which are corrected by something that lies beside them within the same module, as by an adapter.
    """

    modules: ModuleStack
    behind: set[str] = field(default_factory=set)
    corrected: set[str] = field(default_factory=set)
    last: str = ""
    _given: list[Tensor | None] = field(default_factory=list)
    _first: dict[str, str] = field(default_factory=dict)  # by the path of a module: the one that it gives its input to
    _shapes: dict[str, torch.Size] = field(default_factory=dict)

    def enter(self, path: str, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        given = tensors_of((args, kwargs))
        if any(True for _ in module.parameters(recurse=False)):
            self.last = path
            self.behind |= {path} if any(each.requires_grad for each in given) else set()
        first = given[0] if given else None
        if len(self.modules.paths) > 2 and first is not None and self._given[-1] is first:
            self._first.setdefault(self.modules.paths[-2], path)
        self._given.append(first)

    def leave(self, path: str, module: nn.Module, output: object) -> None:
        self._given.pop()
        made = tensors_of(output)
        if made:
            self._shapes[path] = made[0].shape
        inner = self._first.get(path)
        if (
            inner is not None
            and made
            and self._shapes.get(inner) == made[0].shape
            and _trains_beside(module, path, inner)
        ):
            self.corrected.add(inner)


def _trains_beside(module: nn.Module, path: str, inner: str) -> bool:
    own = inner.removeprefix(f"{path}.") + "."
    return any(p.requires_grad for name, p in module.named_parameters() if not name.startswith(own))


def _calls(session: ReplaySession) -> _Calls:
    modules = ModuleStack(session.modules)
    calls = _Calls(modules)
    session.run(Intervention(model=lambda: modules.following(calls.enter, calls.leave)), upto="forward")
    return calls


def _sizes(session: ReplaySession, chosen: Sequence[Tensor]) -> dict[str, float]:
    """The size of the gradient of each tensor, as if these were trained as well."""
    replayer = session.replayer
    with session.live():
        result = replayer.run(
            as_if_trained(session.recorded_step, replayer.subject.parameters, chosen), upto="backward"
        )
    return {name: float(grad.abs().sum()) for name, grad in result.grads.items() if grad is not None}
