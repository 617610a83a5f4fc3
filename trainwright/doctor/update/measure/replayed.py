"""Runs a step again and compares its updates with those of the loop, and with their rule in float64."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright.doctor.update.facts import Differing, FirstSums, RuleFacts, UpdateFacts
from trainwright.doctor.update.measure.again import tolerance_of
from trainwright.recorder.gradients import owned_by
from trainwright.recorder.live_sums import sums_of
from trainwright.recorder.program import OptimizerStep
from trainwright.replay.experiments import experiment
from trainwright.replay.replayer import NotReplayable
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts, strict

ELEMENTS = 4096
"""Of each tensor that are updated again in float64."""
BY_ELEMENT = frozenset(
    ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"]
)
"""Optimizers of torch whose update of an element depends on nothing but its own gradient and state."""
MOST_NAMES, MOST_BEGINS = 16, 512
"""Tensors that are named in the facts, and of which the first sums are."""
ROUNDINGS = 16
"""Operations of an update that round, one after the other: Adam with weight decay has 12."""


@dataclass
class _Made:
    """One update of the replay: what it found and left."""

    optimizer: int
    weights: Tensor
    gradients: Tensor
    left: Tensor | None = None
    slope: float = math.nan
    rule: RuleFacts | None = None


@dataclass
class _Updates:
    """Watches the updates of a replay."""

    session: ReplaySession
    made: list[_Made] = field(default_factory=list)
    _before: dict[str, Tensor] = field(default_factory=dict)
    _grads: dict[str, Tensor] = field(default_factory=dict)
    _states: dict[str, dict[str, Any]] = field(default_factory=dict)

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as undo:
            for number, optimizer in enumerate(self.session.optimizers):
                undo.callback(optimizer.register_step_pre_hook(self._pre(number)).remove)
                undo.callback(optimizer.register_step_post_hook(self._post(number)).remove)
            yield

    def _pre(self, number: int) -> Any:
        def before(optimizer: Optimizer, args: object, kwargs: object) -> None:
            parameters = self.session.replayer.subject.parameters
            self.made.append(_Made(number, sums_of(parameters), sums_of([p.grad for p in parameters])))
            owned = self._owned_by(optimizer)
            self._before = {name: _sampled(p) for name, p in owned.items()}
            self._grads = {name: _sampled(p.grad) for name, p in owned.items() if p.grad is not None}
            self._states = {name: _state_of(optimizer, p) for name, p in owned.items()}

        return before

    def _post(self, number: int) -> Any:
        def after(optimizer: Optimizer, args: object, kwargs: object) -> None:
            made = self.made[-1]
            made.left = sums_of(self.session.replayer.subject.parameters)
            owned = self._owned_by(optimizer)
            changes = {name: _sampled(p).double() - self._before[name].double() for name, p in owned.items()}
            made.slope = _cosine([(self._grads[name], change) for name, change in changes.items()])
            if type(optimizer).__module__.startswith("torch.optim") and type(optimizer).__name__ in BY_ELEMENT:
                made.rule = self._compared(optimizer, owned, changes)

        return after

    def _owned_by(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """The tensors of an optimizer that have a dense gradient."""
        ids = {id(p) for p in owned_by(optimizer)}
        named = {name: p for name, p in self.session.parameters.items() if id(p) in ids}
        return {name: p for name, p in named.items() if p.grad is not None and not p.grad.is_sparse and p.numel()}

    def _compared(self, optimizer: Optimizer, owned: dict[str, Tensor], changes: dict[str, Tensor]) -> RuleFacts | None:
        due, gross = self._due(optimizer, owned), self._due(optimizer, owned, torch.abs)
        if due is None or gross is None:
            return None
        off: dict[str, float] = {}
        kept: dict[str, float] = {}
        whole = along = 0.0
        for name, made in changes.items():
            size = float(due[name].norm())
            if not math.isfinite(size) or size == 0.0:
                continue
            error = float((made - due[name]).norm())
            if not error <= _rounding(self._before[name], self._states[name], max(size, float(gross[name].norm()))):
                off[name] = error / size
            projected = float(made @ due[name])
            kept[name] = projected / size**2
            whole, along = whole + size**2, along + projected
        lost = [name for name, share in kept.items() if share < 0.5]
        dtypes = {str(p.dtype).removeprefix("torch.") for p in owned.values()}
        return RuleFacts(
            optimizer=type(optimizer).__name__,
            tensors=len(kept),
            off=dict(list(off.items())[:MOST_NAMES]),
            kept=along / whole if whole else 1.0,
            least_kept=min(kept.values(), default=1.0),
            lost_in=tuple(lost[:MOST_NAMES]),
            dtype=", ".join(sorted(dtypes)),
            is_hooked=len(optimizer._optimizer_step_post_hooks) > 1,
        )

    def _due(
        self, optimizer: Optimizer, owned: dict[str, Tensor], made: Callable[[Tensor], Tensor] = torch.clone
    ) -> dict[str, Tensor] | None:
        """What the class of the optimizer adds to each sample in float64; None where it cannot.

        ``made`` of weights, gradients and state: of absolute values nothing cancels out, and rounding is of that size.
        """
        wide = {name: made(self._before[name].double()) for name in owned}
        names = {id(p): name for name, p in owned.items()}
        one = copy(optimizer)
        one.state = defaultdict(dict)
        for name, weight in wide.items():
            weight.grad = made(self._grads[name].double())
            if self._states[name]:
                one.state[weight] = {key: _wide(key, value, made) for key, value in self._states[name].items()}
        one.param_groups = [
            {**_in_python(group), "params": [wide[names[id(p)]] for p in group["params"] if id(p) in names]}
            for group in optimizer.param_groups
        ]
        try:
            type(optimizer).step(one)
        except (RuntimeError, TypeError):
            return None
        return {name: weight.detach() - made(self._before[name].double()) for name, weight in wide.items()}


def _sampled(tensor: Tensor) -> Tensor:
    """A copy of elements from all over a tensor."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // ELEMENTS)][:ELEMENTS].clone()


def _state_of(optimizer: Optimizer, p: Tensor) -> dict[str, Any]:
    """Copies of the state of a parameter, of the same elements as its sample."""
    found: dict[str, Any] = {}
    for key, value in optimizer.state.get(p, {}).items():
        is_like = isinstance(value, Tensor) and value.shape == p.shape and p.dim() > 0
        found[key] = _sampled(value) if is_like else value.clone() if isinstance(value, Tensor) else value
    return found


def _in_python(group: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group for the single-tensor form."""
    off: dict[str, Any] = {key: False for key in ("foreach", "fused", "capturable") if key in group}
    return {**group, **off, "lr": float(group["lr"])}


def _cosine(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Of two samples of all tensors, the first of gradients."""
    if not pairs:
        return math.nan
    grads, changes = (torch.cat([pair[n].double().cpu() for pair in pairs]) for n in (0, 1))
    sizes = float(grads.norm() * changes.norm())
    return float(grads @ changes) / sizes if sizes > 0 else math.nan


def _rounding(before: Tensor, state: dict[str, Any], size: float) -> float:
    """How far rounding may put an update of this size: of the weights once, of the update in each operation."""
    kinds = [v.dtype for k, v in state.items() if isinstance(v, Tensor) and v.is_floating_point() and k != "step"]
    coarsest = max(torch.finfo(kind).eps for kind in (before.dtype, *kinds))
    return torch.finfo(before.dtype).eps * (float(before.double().norm()) + size) + ROUNDINGS * coarsest * size


def _wide(key: str, value: object, made: Callable[[Tensor], Tensor]) -> object:
    is_number = isinstance(value, Tensor) and value.is_floating_point() and key != "step"
    return made(value.double()) if is_number and isinstance(value, Tensor) else value


@experiment(UpdateFacts.experiment, when="checkup")
def update_made(session: ReplaySession) -> Facts:
    """Compares the updates of the step with those of its replay, and of their rule."""
    if "vetoed" in session.recorded_step.values:
        raise NotReplayable("the update was left out")
    updates = _Updates(session)
    with session.live(), updates.watching():
        result = session.replayer.run(session.recorded_step, upto="step")
    if result.error is not None:
        raise result.error
    steps = [each for each in session.recorded_step.program if isinstance(each, OptimizerStep)]
    pairs = list(zip(steps, updates.made)) if len(steps) == len(updates.made) else []
    compared = [(step, made) for step, made in pairs if step.left is not None]
    owned = [_owned(session, made) for _, made in compared]
    found = [(step, made) for step, made in pairs if step.weights is not None]
    of_weights = [(step.weights, made.weights) for step, made in found]
    of_gradients = [(step.gradients, made.gradients) for step, made in compared]
    of_left = [(step.left, made.left) for step, made in compared]
    losses = [float(each) for each in session.recorded_step.losses]
    loss = sum(losses) / len(losses) if losses else math.nan
    facts = UpdateFacts(
        is_compared=bool(compared),
        edited="edited" in session.recorded_step.values,
        tensors=max((made.rule.tensors for _, made in pairs if made.rule), default=len(session.replayer.names)),
        written=_differing(session, of_weights, [_owned(session, made) for _, made in found]),
        regraded=_differing(session, of_gradients, owned),
        left=_differing(session, of_left, owned),
        has_same_loss=math.isclose(loss, result.loss, rel_tol=tolerance_of(session)),
        loss=loss,
        replayed_loss=result.loss,
        rules=tuple(made.rule for made in updates.made if made.rule is not None),
        slopes=tuple(made.slope for made in updates.made),
        optimizers=tuple(type(session.optimizers[made.optimizer]).__name__ for made in updates.made),
        maximises=any(bool(group.get("maximize")) for o in session.optimizers for group in o.param_groups),
        is_grafted=bool(session.recorded_step.values.get("grafted")),
        begin=_begin(session, steps),
    )
    values: Facts = strict(vars(facts))
    return values


def written_before(session: ReplaySession) -> tuple[Differing, ...]:
    """The weights that something had written to before the first update of the step found them."""
    step = next((each for each in session.recorded_step.program if isinstance(each, OptimizerStep)), None)
    if step is None or step.weights is None:
        return ()
    with session.live():
        found = sums_of(session.replayer.subject.parameters)
    numbers = [n for n, p in enumerate(session.replayer.subject.parameters) if p.requires_grad]
    return _differing(session, [(step.weights, found)], [numbers], most=len(numbers))


def _begin(session: ReplaySession, steps: Sequence[OptimizerStep]) -> dict[str, FirstSums]:
    """The sums of the first weights; nothing at later steps."""
    if len(session.recorded_steps) > 1 or not steps or steps[0].weights is None:
        return {}
    rows: list[tuple[float, float]] = steps[0].weights.tolist()
    sums = [FirstSums(*row, p.numel()) for row, p in zip(rows, session.replayer.subject.parameters)]
    return dict(list(zip(session.replayer.names, sums))[:MOST_BEGINS])


def _owned(session: ReplaySession, made: _Made) -> list[int]:
    """The numbers of the parameters of the optimizer that made an update."""
    owned = {id(p) for p in owned_by(session.optimizers[made.optimizer])}
    return [n for n, p in enumerate(session.replayer.subject.parameters) if id(p) in owned]


def _differing(
    session: ReplaySession,
    pairs: Sequence[tuple[Tensor | None, Tensor | None]],
    owned: Sequence[list[int]],
    most: int = MOST_NAMES,
) -> tuple[Differing, ...]:
    """The tensors whose sums differ by more than half of the digits of their dtype."""
    found: dict[str, Differing] = {}
    named = list(zip(session.replayer.names, session.replayer.subject.parameters))
    for (live, again), numbers in zip(pairs, owned):
        if live is None or again is None or len(live) != len(again):
            continue
        rows = torch.cat([live.cpu(), again.cpu()], dim=1).tolist()
        for number in numbers:
            name, p = named[number]
            norm, total, other_norm, other_total = rows[number]
            if _differs(p, norm, total, other_norm, other_total):
                found.setdefault(name, Differing(name, norm, other_norm, total, other_total))
    return tuple(list(found.values())[:most])


def _differs(p: Tensor, norm: float, total: float, other_norm: float, other_total: float) -> bool:
    if math.isnan(norm) or math.isnan(other_norm):  # None, or no number: told elsewhere where both are not
        return math.isnan(norm) != math.isnan(other_norm) and (norm > 0.0 or other_norm > 0.0)
    near = math.sqrt(torch.finfo(p.dtype).eps) * max(norm, other_norm)
    return abs(norm - other_norm) > near or abs(total - other_total) > near * math.sqrt(max(1, p.numel()))
