"""Finds copies of the weights (modules, dicts and lists of equal shapes) and measures how the copies follow them."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from trainwright.checkpoint.snapshot import LiveObjects
from trainwright.doctor.facts.weights import AveragesFacts, CopyFacts, Move, StaleStatistics
from trainwright.doctor.measure.tensors import sampled
from trainwright.recorder.callers import caller, frames, is_recorders
from trainwright.recorder.calls import Hook
from trainwright.recorder.gradients import owned_by
from trainwright.recorder.plain_tensors import is_dense
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.user_types import Args
from trainwright.replay.mechanism import HALF_DTYPES

SEARCH_STEP = 24  # The step after which copies are searched for, once. The search takes milliseconds.
SEARCH_STEP_IF_RESUMED = 8
FOLLOWED_STEPS = 16  # Number of steps in which copies are sampled after the search
MAX_COPIES = 32
TENSORS_PER_COPY = 4
ELEMENTS_PER_TENSOR = 64
MAX_STEPS_WITHOUT_MOVE = 8
"""A copy that does not move in the first steps after the search is dropped: it may be of another run."""
MAX_DEPTH = 2  # Depth of submodules that may have copies
MAX_OBJECTS = 50_000  # Number of objects that are searched
MAX_ITEMS = 1024  # Longer containers hold data
_CLOSED = (Tensor, ModuleType, FunctionType, BuiltinFunctionType, CodeType, FrameType, TracebackType, type)
Holder: TypeAlias = dict[object, Tensor] | list[Tensor]


@dataclass
class _Copy:
    """A copy that is sampled. ``before`` are the samples of the previous step."""

    facts: CopyFacts
    holder: nn.Module | Holder
    original: nn.Module
    before: list[tuple[Tensor, Tensor]] | None = None
    # (path, normalization of the copy, trained normalization, running mean of the copy when it was found)
    norms: list[tuple[str, _NormBase, _NormBase, Tensor]] = field(default_factory=list)

    def compare_means(self, step: int) -> None:
        """Compares the running means of a copy that is called in eval mode with those of the trained module."""
        for path, norm, trained, first in self.norms:
            mean, other = norm.running_mean, trained.running_mean
            if mean is None or other is None or trained.running_var is None or not torch.equal(mean, first):
                return
            distance = float(((other - mean).abs() / (trained.running_var + trained.eps).sqrt()).max())
            if self.facts.stale is None or distance > self.facts.stale.distance:
                self.facts.stale = StaleStatistics(path, step, distance, caller())

    def samples(self) -> list[tuple[Tensor, Tensor]] | None:
        """Returns (sample of a copied tensor, sample of its original) for some tensors; None if not comparable.

        The tensors are looked up in every step because the loop may replace them.
        """
        pairs = list(zip(_tensors_of(self.holder), self.original.parameters()))
        last, count = len(pairs) - 1, TENSORS_PER_COPY - 1
        pairs = [pairs[n] for n in sorted({round(last * n / count) for n in range(count + 1)})] if pairs else []
        if not pairs or not all(_is_value(copy) and copy.shape == weight.shape for copy, weight in pairs):
            return None
        now = [(_sampled(copy), _sampled(weight)) for copy, weight in pairs if not copy.is_meta and not weight.is_meta]
        return now if all(len(copy) == len(weight) for copy, weight in now) else None

    def follow(self, step: int) -> None:
        now = self.samples()
        if now and self.before and [len(copy) for copy, _ in now] == [len(copy) for copy, _ in self.before]:
            made = _move(step, self.before, now)
            self.facts.moves += () if made is None else (made,)
        elif now:
            copy, weights = (torch.cat([pair[n] for pair in now]) for n in (0, 1))
            self.facts.gap = float((copy - weights).norm() / weights.norm().clamp(min=1e-30))
        self.before = now


class Averages(Probe):
    """Searches for copies of the weights once, then samples them for some steps."""

    name = AveragesFacts.experiment
    only_changes = True

    def __init__(self, watched: WatchedObjects) -> None:
        self._subject, self._sites = watched.subject, watched.sites
        self._copies: list[_Copy] = []
        self._begun: int | None = None
        self._last = self._step = 0
        self._is_resumed = any(each.state for each in watched.subject.optimizers)
        self._handles: list[RemovableHandle] = []

    def on_closed(self, step: RecordedStep) -> None:
        self._step = step.step
        if self._begun is None and step.step >= (SEARCH_STEP_IF_RESUMED if self._is_resumed else SEARCH_STEP):
            self._begun = step.step
            self._copies = list(_copies_of(self._subject))
            self._sites.follow([each.holder for each in self._copies if isinstance(each.holder, nn.Module)])
            for copy in self._copies:
                if isinstance(copy.holder, nn.Module) and copy.norms:
                    self._handles.append(copy.holder.register_forward_pre_hook(self._hook(copy, copy.holder)))
        if self._begun is None or step.step > self._begun + FOLLOWED_STEPS:
            return
        for copy in self._copies:
            copy.follow(step.step)
        if step.step == self._begun + MAX_STEPS_WITHOUT_MOVE:
            self._copies = [copy for copy in self._copies if copy.facts.moves]
        self._last = step.step
        self.urgent = step.step == self._begun + FOLLOWED_STEPS and any(copy.facts.moves for copy in self._copies)

    def _hook(self, copy: _Copy, module: nn.Module) -> Hook:
        def called(module: nn.Module, args: Args) -> None:
            known = copy.facts.stale
            if not module.training and copy.facts.moves and (known is None or known.step < self._step):
                copy.compare_means(self._step)
                self.urgent = self.urgent or (known is None and copy.facts.stale is not None)

        return Hook(module, called)

    def end(self, error: BaseException | None) -> None:
        for handle in self._handles:
            handle.remove()

    def facts(self) -> AveragesFacts | None:
        self.urgent = False
        if self._begun is None or self._last == self._begun:
            return None
        steps, copies = self._last - self._begun, tuple(replace(copy.facts) for copy in self._copies)
        return AveragesFacts(steps, self._is_resumed, copies)


def _sampled(tensor: Tensor) -> Tensor:
    return sampled(tensor, ELEMENTS_PER_TENSOR).to("cpu", torch.float64)


def _move(step: int, before: Sequence[tuple[Tensor, Tensor]], now: Sequence[tuple[Tensor, Tensor]]) -> Move | None:
    """Returns the move of a copy between two steps; None if it did not move."""
    copy, weights = (torch.cat([pair[n] for pair in before]) for n in (0, 1))
    moved = torch.cat([pair[0] for pair in now]) - copy
    size, gap = float(moved.norm()), weights - copy
    if not size > 0.0 or not bool(torch.isfinite(moved).all()):
        return None
    fraction = float(moved @ gap) / max(float(gap @ gap), 1e-300)
    both = torch.linalg.lstsq(torch.stack([gap, copy], dim=1), moved[:, None]).solution[:, 0]
    return Move(
        step=step,
        share=fraction,
        growth=float(both[1]),
        rest=float((moved - both[0] * gap - both[1] * copy).norm()) / size,
        rest_alone=float((moved - fraction * gap).norm()) / size,
        still=float((moved == 0).double().mean()),
    )


def _copies_of(subject: LiveObjects) -> Iterator[_Copy]:
    """Yields the copies of trained modules, largest first, without duplicates."""
    owned = {id(p) for optimizer in subject.optimizers for p in owned_by(optimizer)}
    named = [(path, m) for root in subject.roots for path, m in root.named_modules() if path.count(".") < MAX_DEPTH]
    originals: dict[tuple[torch.Size, ...], tuple[str, nn.Module]] = {}
    for path, module in named:
        if any(map(is_lazy, module.parameters())):
            continue
        shapes = tuple(p.shape for p in module.parameters())
        if any(id(p) in owned for p in module.parameters()) and any(shapes) and len(shapes) > 1:
            originals.setdefault(shapes, (path, module))
    found, covered = 0, set(owned)
    holders = [(each, _tensors_of(each)) for each in _holders({len(shapes) for shapes in originals})]
    # largest first, and a module before a list of its tensors
    for holder, tensors in sorted(holders, key=lambda each: (-len(each[1]), not isinstance(each[0], nn.Module))):
        original, ids = originals.get(tuple(t.shape for t in tensors)), {id(t) for t in tensors}
        if original is None or ids & covered or found == MAX_COPIES:
            continue
        covered |= ids
        found += 1
        path, module = original
        norms = list(_norms_of(holder, module)) if isinstance(holder, nn.Module) else []
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors[0].dtype in HALF_DTYPES else ""
        facts = CopyFacts(type(holder).__name__, path or type(module).__name__, dtype=dtype)
        yield _Copy(facts, holder, module, norms=norms)


def _holders(lengths: set[int]) -> Iterator[nn.Module | Holder]:
    """Yields modules, dicts and lists with a number of tensors in ``lengths``, but no dicts of parameters."""
    for each in _reached():
        kind = type(each)
        if kind in (dict, list):
            if len(each) not in lengths or (kind is dict and all(isinstance(t, nn.Parameter) for t in each.values())):
                continue
        elif not issubclass(kind, nn.Module):
            continue
        if len(tensors := _tensors_of(each)) in lengths and all(map(_is_value, tensors)):
            yield each


def _reached() -> Iterator[Any]:
    """Yields the objects that the loop can reach from its variables, those of its innermost function first.

    All objects of the process are about 20 times as many. Contents of data and ``_CLOSED`` types are not searched.
    """
    seen: dict[int, object] = {}  # holds each object, so that its id is not reused
    for frame in frames():
        level = [] if is_recorders(frame) else [*frame.f_locals.values(), *frame.f_globals.values()]
        while level and len(seen) < MAX_OBJECTS:
            level = [each for each in {id(each): each for each in level}.values() if id(each) not in seen]
            seen.update((id(each), each) for each in level)
            yield from level
            functions = [each for each in level if type(each) is FunctionType]
            level = list(filter(gc.is_tracked, gc.get_referents(*filter(_is_searched, level))))
            level += [held for each in functions for held in (*(each.__closure__ or ()), *(each.__defaults__ or ()))]


def _is_searched(value: object) -> bool:
    """Returns True if the contents of an object may belong to the program's state."""
    kind = type(value)
    is_ours = kind.__module__.startswith("trainwright.") and not issubclass(kind, nn.Module)
    is_data = kind in (list, dict, tuple, set) and len(value) > MAX_ITEMS  # type: ignore[arg-type]
    return not (is_ours or is_data or issubclass(kind, _CLOSED))


def _is_value(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and tensor.grad_fn is None and is_dense(tensor) and not is_lazy(tensor)


def _tensors_of(holder: nn.Module | Holder) -> list[Tensor]:
    if isinstance(holder, nn.Module):
        return list(holder.parameters()) if "_parameters" in vars(holder) else []
    return list(holder.values()) if isinstance(holder, dict) else holder


def _norms_of(copy: nn.Module, original: nn.Module) -> Iterator[tuple[str, _NormBase, _NormBase, Tensor]]:
    """Yields the entries of ``_Copy.norms``: the normalizations with running statistics, paired in order."""
    for (path, mine), (_, theirs) in zip(_tracking(copy), _tracking(original)):
        if mine.running_mean is not None:
            yield path, mine, theirs, mine.running_mean.clone()


def _tracking(module: nn.Module) -> list[tuple[str, _NormBase]]:
    return [(path, m) for path, m in module.named_modules() if isinstance(m, _NormBase) and m.running_mean is not None]
