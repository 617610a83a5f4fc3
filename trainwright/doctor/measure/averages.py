"""Finds copies of the weights (modules, dicts and lists of equal shapes) and measures how they follow them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.hooks import RemovableHandle

from trainwright.checkpoint.snapshot import LiveObjects, Snapshot
from trainwright.doctor.facts.averages import AveragesFacts, CopyFacts, Move, StaleStatistics
from trainwright.doctor.measure.tensors import sampled
from trainwright.recorder.callers import caller
from trainwright.recorder.calls import Hook
from trainwright.recorder.gradients import owned_by
from trainwright.recorder.plain_tensors import is_dense
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.user_types import Args

SEARCH_STEP = 24  # The step after which copies are searched for, once. The search takes 0.05 s.
SEARCH_STEP_IF_RESUMED = 8
FOLLOWED_STEPS = 16  # Number of steps in which copies are sampled after the search
MAX_COPIES = 32
TENSORS_PER_COPY = 4
ELEMENTS_PER_TENSOR = 64
MAX_STEPS_WITHOUT_MOVE = 8
"""A copy that has not moved for this many steps is dropped: a process may hold copies of other runs."""
MAX_DEPTH = 2  # Depth of submodules that may have copies


@dataclass(frozen=True)
class _Original:
    """A module with trained parameters."""

    path: str
    module: nn.Module

    @property
    def weights(self) -> dict[str, Tensor]:
        return dict(self.module.named_parameters())


@dataclass
class _Pair:
    """A tensor of a copy and its original. Both are looked up in every step because either may be replaced."""

    copy: Callable[[], Tensor | None]
    original: Callable[[], Tensor]
    size: int | None = None  # Number of sampled elements

    def sample(self) -> tuple[Tensor, Tensor] | None:
        copy, original = self.copy(), self.original()
        if copy is None or copy.shape != original.shape or copy.is_meta or original.is_meta:
            return None
        now = _sampled(copy), _sampled(original)
        self.size = len(now[0]) if self.size is None else self.size
        is_whole = len(now[0]) == len(now[1]) == self.size  # else this process holds only a part of one of them
        return now if is_whole else None


@dataclass
class _Copy:
    """A copy that is sampled. ``before`` are the samples of the previous step."""

    kind: str
    of: str
    weights: list[_Pair]
    module: nn.Module | None  # The object that holds the copy, if it is a module
    before: list[tuple[Tensor, Tensor]] | None = None
    moves: list[Move] = field(default_factory=list)
    gap: float = 0.0
    # for each normalization of the copy: its path, itself, the trained one, and its running mean when it was found
    norms: list[tuple[str, _NormBase, _NormBase, Tensor]] = field(default_factory=list)
    stale: StaleStatistics | None = None

    def compare_means(self, step: int) -> None:
        """Compares the running means of a copy that is called in eval mode with those of the trained module."""
        for path, norm, trained, first in self.norms:
            mean, other = norm.running_mean, trained.running_mean
            if mean is None or other is None or trained.running_var is None or not torch.equal(mean, first):
                return
            distance = float(((other - mean).abs() / (trained.running_var + trained.eps).sqrt()).max())
            if self.stale is None or distance > self.stale.distance:
                self.stale = StaleStatistics(path, step, distance, caller())

    def follow(self, step: int) -> None:
        now = [each for pair in self.weights if (each := pair.sample()) is not None]
        if len(now) == len(self.weights) and self.before is not None:
            made = _move(step, self.before, now)
            self.moves += [] if made is None else [made]
        elif now:
            copy, weights = (torch.cat([pair[n] for pair in now]) for n in (0, 1))
            self.gap = float((copy - weights).norm() / weights.norm().clamp(min=1e-30))
        self.before = now if len(now) == len(self.weights) else None


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
            self._sites.follow([each.module for each in self._copies if each.module is not None])
            for copy in self._copies:
                if copy.module is not None and copy.norms:
                    self._handles.append(copy.module.register_forward_pre_hook(self._hook(copy, copy.module)))
        if self._begun is None or step.step > self._begun + FOLLOWED_STEPS:
            return
        for copy in self._copies:
            copy.follow(step.step)
        if step.step == self._begun + MAX_STEPS_WITHOUT_MOVE:
            self._copies = [copy for copy in self._copies if copy.moves]
        self._last = step.step
        self.urgent = step.step == self._begun + FOLLOWED_STEPS and any(copy.moves for copy in self._copies)

    def _hook(self, copy: _Copy, module: nn.Module) -> Hook:
        def called(module: nn.Module, args: Args) -> None:
            if not module.training and copy.moves and (copy.stale is None or copy.stale.step < self._step):
                known = copy.stale
                copy.compare_means(self._step)
                self.urgent = self.urgent or (known is None and copy.stale is not None)

        return Hook(module, called)

    def end(self, error: BaseException | None) -> None:
        for handle in self._handles:
            handle.remove()

    def facts(self) -> AveragesFacts | None:
        self.urgent = False
        if self._begun is None or self._last == self._begun:
            return None
        return AveragesFacts(
            self._last - self._begun,
            self._is_resumed,
            tuple(CopyFacts(copy.kind, copy.of, tuple(copy.moves), copy.gap, copy.stale) for copy in self._copies),
        )


def _sampled(tensor: Tensor) -> Tensor:
    return sampled(tensor, ELEMENTS_PER_TENSOR).to("cpu", torch.float64)


def _move(step: int, before: Sequence[tuple[Tensor, Tensor]], now: Sequence[tuple[Tensor, Tensor]]) -> Move | None:
    """Returns the move of a copy between two steps; None if it did not move."""
    copy, weights = (torch.cat([pair[n] for pair in before]) for n in (0, 1))
    moved = torch.cat([pair[0] for pair in now]) - copy
    size, way = float(moved.norm()), weights - copy
    if not size > 0.0 or not bool(torch.isfinite(moved).all()):
        return None
    share = float(moved @ way) / max(float(way @ way), 1e-300)
    both = torch.linalg.lstsq(torch.stack([way, copy], dim=1), moved[:, None]).solution[:, 0]
    return Move(
        step=step,
        share=share,
        growth=float(both[1]),
        rest=float((moved - both[0] * way - both[1] * copy).norm()) / size,
        rest_alone=float((moved - share * way).norm()) / size,
    )


def _copies_of(subject: LiveObjects) -> Iterator[_Copy]:
    """Yields the copies of trained modules, largest first, without duplicates."""
    owned = {id(p) for optimizer in subject.optimizers for p in owned_by(optimizer)}
    originals = [each for each in _originals(subject) if any(id(p) in owned for p in each.weights.values())]
    by_shapes: dict[tuple[torch.Size, ...], _Original] = {}
    for each in originals:
        shapes = tuple(p.shape for p in each.weights.values())
        if sum(map(len, shapes)) and len(shapes) > 1:
            by_shapes.setdefault(shapes, each)
    covered = set(owned)
    found = 0
    for holder, kind, tensors in sorted(_holders(by_shapes), key=_rank):
        ids = {id(t) for t in tensors}
        if ids & covered or found == MAX_COPIES:
            continue
        covered |= ids
        found += 1
        yield _paired(holder, kind, by_shapes[tuple(t.shape for t in tensors)])


def _rank(holder: tuple[object, str, list[Tensor]]) -> tuple[int, bool]:
    """Sort key: largest first, and a module before a list of its tensors."""
    return -len(holder[2]), not isinstance(holder[0], nn.Module)


def _originals(subject: LiveObjects) -> list[_Original]:
    named = [(path, m) for root in subject.roots for path, m in root.named_modules() if path.count(".") < MAX_DEPTH]
    return [_Original(path, module) for path, module in named]


def _holders(
    by_shapes: dict[tuple[torch.Size, ...], _Original],
) -> Iterator[tuple[object, str, list[Tensor]]]:
    """Yields modules, dicts and lists whose tensors have the shapes of an original, in its order."""
    lengths = {len(shapes) for shapes in by_shapes}
    of_modules = _subclasses(nn.Module)
    wanted = {dict, list, Snapshot, *of_modules}
    there = gc.get_objects()  # some 300,000, so that they are chosen without a loop in Python
    chosen = list(compress(there, map(wanted.__contains__, map(type, there))))
    ours = {id(each.parameters) for each in compress(chosen, map({Snapshot}.__contains__, map(type, chosen)))}
    containers = list(compress(chosen, map({dict, list}.__contains__, map(type, chosen))))
    modules = compress(chosen, map(of_modules.__contains__, map(type, chosen)))
    of_length = [*compress(containers, map(lengths.__contains__, map(len, containers))), *modules]
    for each in of_length:
        kind = type(each)
        if kind is dict or kind is list:
            tensors = list(each.values()) if kind is dict else each
        else:
            tensors = list(each.parameters()) if "_parameters" in vars(each) else []
        is_whole = bool(tensors) and all(isinstance(t, Tensor) and t.grad_fn is None and is_dense(t) for t in tensors)
        if not is_whole or tuple(t.shape for t in tensors) not in by_shapes or _is_parts(each, kind):
            continue
        if kind is not list or id(each) not in ours:
            yield each, kind.__name__, list(tensors)


def _subclasses(kind: type) -> set[type]:
    """Returns a class and all classes that are derived from it."""
    return {kind}.union(*map(_subclasses, kind.__subclasses__()))


def _is_parts(holder: object, kind: type) -> bool:
    """Returns True if a dict holds the parameters of one module. The module itself is used then."""
    return kind is dict and isinstance(holder, dict) and all(isinstance(t, nn.Parameter) for t in holder.values())


def _paired(holder: object, kind: str, original: _Original) -> _Copy:
    weights = original.weights
    names = list(weights)
    chosen = sorted({round(n * (len(names) - 1) / (TENSORS_PER_COPY - 1)) for n in range(TENSORS_PER_COPY)})
    pairs = [_Pair(_lookup(holder, n), _live(original.module, names[n])) for n in chosen]
    module = holder if isinstance(holder, nn.Module) else None
    norms = [] if module is None else list(_norms_of(module, original.module))
    return _Copy(kind, original.path or type(original.module).__name__, pairs, module, norms=norms)


def _norms_of(copy: nn.Module, original: nn.Module) -> Iterator[tuple[str, _NormBase, _NormBase, Tensor]]:
    """Yields the normalizations of a copy with running statistics, and those of the original in the same order."""
    of_both = zip(_tracking(copy), _tracking(original))
    for (path, mine), (_, theirs) in of_both:
        if mine.running_mean is not None and theirs.running_mean is not None:
            yield path, mine, theirs, mine.running_mean.clone()


def _tracking(module: nn.Module) -> list[tuple[str, _NormBase]]:
    return [(path, m) for path, m in module.named_modules() if isinstance(m, _NormBase) and m.running_mean is not None]


def _lookup(holder: object, place: int) -> Callable[[], Tensor | None]:
    def tensor() -> Tensor | None:
        if isinstance(holder, nn.Module):
            tensors: list[object] = list(holder.parameters())
        else:
            tensors = list(holder.values()) if isinstance(holder, dict) else list(holder)  # type: ignore[call-overload]
        found = tensors[place] if place < len(tensors) else None
        return found if isinstance(found, Tensor) else None

    return tensor


def _live(module: nn.Module, name: str) -> Callable[[], Tensor]:
    path, _, own = name.rpartition(".")
    return lambda: getattr(module.get_submodule(path), own)
