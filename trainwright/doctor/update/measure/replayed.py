"""Runs a step again and compares its updates with those of the loop, and with their rule in float64."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright.doctor.update.facts import Differing, RuleFacts, UpdateFacts
from trainwright.recorder.gradients import owned_by
from trainwright.recorder.live_sums import sums_of
from trainwright.recorder.program import OptimizerStep
from trainwright.replay.experiments import experiment
from trainwright.replay.experiments.reproduce import tolerance_of
from trainwright.replay.replayer import NotReplayable
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts, strict

MOST_ELEMENTS = 1 << 22
"""Of the weights whose update is computed again in float64: the smallest tensors first."""
MOST_NAMES = 16
"""Tensors that are named in the facts."""
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
            chosen = self._chosen(optimizer)
            self._before = {name: p.detach().clone() for name, p in chosen.items()}
            self._states = {name: _copies(optimizer.state.get(p, {})) for name, p in chosen.items()}

        return before

    def _post(self, number: int) -> Any:
        def after(optimizer: Optimizer, args: object, kwargs: object) -> None:
            made = self.made[-1]
            made.left = sums_of(self.session.replayer.subject.parameters)
            chosen = self._chosen(optimizer)
            changes = {name: p.detach() - self._before[name] for name, p in chosen.items()}
            made.slope = _cosine([(p.grad, changes[name]) for name, p in chosen.items() if p.grad is not None])
            if type(optimizer).__module__.startswith("torch.optim"):
                made.rule = self._compared(optimizer, chosen)

        return after

    def _chosen(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """The owned tensors that have a dense gradient, the smallest first, as many as the bound allows."""
        owned = {id(p) for p in owned_by(optimizer)}
        named = {name: p for name, p in self.session.parameters.items() if id(p) in owned and p.grad is not None}
        chosen: dict[str, Tensor] = {}
        room = MOST_ELEMENTS
        for name, p in sorted(named.items(), key=lambda each: each[1].numel()):
            room -= p.numel()
            if p.grad is not None and not p.grad.is_sparse and (room >= 0 or not chosen):
                chosen[name] = p
        return chosen

    @torch.no_grad()
    def _compared(self, optimizer: Optimizer, chosen: dict[str, Tensor]) -> RuleFacts | None:
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        off: dict[str, float] = {}
        kept: dict[str, float] = {}
        whole = along = 0.0
        for name, p in chosen.items():
            due = _due(optimizer, groups[id(p)], self._before[name], p.grad, self._states[name])
            if due is None:
                return None
            size, made = float(due.norm()), p.detach().double() - self._before[name].double()
            if not math.isfinite(size) or size == 0.0:
                continue
            error, allowed = float((made - due).norm()), _rounding(p, self._states[name], size)
            if not error <= allowed:
                off[name] = error / size
            projected = float((made * due).sum())
            kept[name] = projected / size**2
            whole, along = whole + size**2, along + projected
        lost = [name for name, share in kept.items() if share < 0.5]
        dtypes = {str(p.dtype).removeprefix("torch.") for p in chosen.values()}
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


def _copies(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def _cosine(pairs: list[tuple[Tensor, Tensor]]) -> float:
    dots, grads, changes = (
        sum(float(torch.dot(a.detach().double().flatten(), b.double().flatten())) for a, b in rows)
        for rows in (pairs, [(g, g.detach()) for g, _ in pairs], [(c, c) for _, c in pairs])
    )
    return dots / math.sqrt(grads * changes) if grads > 0 and changes > 0 else math.nan


def _rounding(p: Tensor, state: dict[str, Any], size: float) -> float:
    """How far rounding may put an update of this size: of the weights once, of the update in each operation."""
    kinds = [v.dtype for k, v in state.items() if isinstance(v, Tensor) and v.is_floating_point() and k != "step"]
    coarsest = max(torch.finfo(kind).eps for kind in (p.dtype, *kinds))
    return torch.finfo(p.dtype).eps * float(p.detach().double().norm()) + ROUNDINGS * coarsest * size


def _due(
    optimizer: Optimizer, group: dict[str, Any], before: Tensor, grad: Tensor | None, state: dict[str, Any]
) -> Tensor | None:
    """What the class of the optimizer adds to one tensor in float64; None where it cannot."""
    if grad is None:
        return None
    weight = before.double()
    weight.grad = grad.detach().double()
    one = copy(optimizer)
    plain: dict[str, Any] = {key: float(group[key]) for key in ("lr",) if isinstance(group.get(key), Tensor)}
    off: dict[str, Any] = {key: False for key in ("foreach", "fused", "capturable") if key in group}
    one.param_groups = [{**group, **plain, **off, "params": [weight]}]
    one.state = defaultdict(dict)
    if state:
        one.state[weight] = {key: _wide(key, value) for key, value in state.items()}
    try:
        type(optimizer).step(one)
    except (RuntimeError, TypeError):
        return None
    return weight.detach() - before.double()


def _wide(key: str, value: object) -> object:
    is_number = isinstance(value, Tensor) and value.is_floating_point() and key != "step"
    return value.double() if is_number and isinstance(value, Tensor) else value


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
    of_weights = [(step.weights, made.weights) for step, made in compared]
    of_gradients = [(step.gradients, made.gradients) for step, made in compared]
    of_left = [(step.left, made.left) for step, made in compared]
    losses = [float(each) for each in session.recorded_step.losses if each.numel() == 1]
    loss = sum(losses) / len(losses) if losses else math.nan
    facts = UpdateFacts(
        is_compared=bool(compared),
        edited="edited" in session.recorded_step.values,
        tensors=max((made.rule.tensors for _, made in pairs if made.rule), default=len(session.replayer.names)),
        written=_differing(session, of_weights, owned),
        regraded=_differing(session, of_gradients, owned),
        left=_differing(session, of_left, owned),
        has_same_loss=math.isclose(loss, result.loss, rel_tol=tolerance_of(session)),
        loss=loss,
        replayed_loss=result.loss,
        rules=tuple(made.rule for made in updates.made if made.rule is not None),
        slopes=tuple(made.slope for made in updates.made),
        optimizers=tuple(type(session.optimizers[made.optimizer]).__name__ for made in updates.made),
        maximises=any(bool(group.get("maximize")) for o in session.optimizers for group in o.param_groups),
    )
    told: Facts = strict(vars(facts))
    return told


def _owned(session: ReplaySession, made: _Made) -> list[int]:
    """The numbers of the parameters of the optimizer that made an update."""
    owned = {id(p) for p in owned_by(session.optimizers[made.optimizer])}
    return [n for n, p in enumerate(session.replayer.subject.parameters) if id(p) in owned]


def _differing(
    session: ReplaySession, pairs: Sequence[tuple[Tensor | None, Tensor | None]], owned: Sequence[list[int]]
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
    return tuple(list(found.values())[:MOST_NAMES])


def _differs(p: Tensor, norm: float, total: float, other_norm: float, other_total: float) -> bool:
    if math.isnan(norm) or math.isnan(other_norm):  # None, or no number: told elsewhere where both are not
        return math.isnan(norm) != math.isnan(other_norm) and (norm > 0.0 or other_norm > 0.0)
    near = math.sqrt(torch.finfo(p.dtype).eps) * max(norm, other_norm)
    return abs(norm - other_norm) > near or abs(total - other_total) > near * math.sqrt(max(1, p.numel()))
