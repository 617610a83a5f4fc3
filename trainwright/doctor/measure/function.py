"""Replays of the forward pass in eval mode with one thing changed."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainwright.doctor.facts.layers import MASK_OF_ONES, Deviation, FunctionFacts, PaddedFacts
from trainwright.doctor.measure.tensors import graph_of_nodes, padding_of
from trainwright.recorder.plain_tensors import plain
from trainwright.recorder.program import Operation, constants_of, tensors_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.experiments import replay
from trainwright.replay.functions import InputHandler, change_leaves, function_name
from trainwright.replay.modules import ModuleStack
from trainwright.replay.replayer import UNCHANGED, Intervention
from trainwright.replay.samples import losses_of
from trainwright.replay.session import ReplaySession
from trainwright.replay.trace import replayed_line

NOISE_MULTIPLE = 16
"""Multiple of the step's numerical noise that still counts as rounding. Each layer of a model adds noise."""
Outputs = Sequence[Tensor]


MAX_CONFIRMED_RATIO = 100  # Deviations above this multiple of the limit are not confirmed in float64
ROUNDING_SHRINKAGE = 0.1
"""A deviation that shrinks below this fraction in float64 is rounding. A real one keeps its size."""


class EvalPasses:
    """The passes of one step. ``limit`` is the largest distance that rounding explains, in standard deviations.

    The limit is derived from the change of the outputs when every weight changes in its last bit, and from the
    precision of the outputs. ``is_quick``: the limit is not measured and is infinite.
    """

    def __init__(self, session: ReplaySession, dtype: Literal["fp64"] | None = None, *, is_quick: bool = False) -> None:
        self.session, self._dtype, self._is_staged, self.limit = session, dtype, False, math.inf
        self.base = self.run()
        if not is_quick:
            moved = self.run(Intervention(model=self._jittered))
            self.limit = NOISE_MULTIPLE * (max_distance(self.base, moved) + self._eps())

    def run(self, change: Intervention = UNCHANGED) -> Outputs:
        """Returns the outputs of all models. Raises the error of the model."""
        change, session = replace(change, mode="eval", dtype=self._dtype), self.session
        if self._is_staged:
            result = session.replayer.run(session.recorded_step, change, upto="forward")
        else:
            result = session.run(change, upto="forward")
        wanted = len(self.session.recorded_step.calls)
        if result.error is not None and len(result.outputs) < wanted:
            raise result.error
        return numbers_of(result.outputs)

    @contextmanager
    def in_one_stage(self) -> Iterator[None]:
        """Context in which the recorded state is loaded once for all passes. Loading it takes longer than a pass.

        Each pass begins with the state that the previous pass has left, so no intervention may write to the model.
        """
        with self.session.live():
            self._is_staged = True
            try:
                yield
            finally:
                self._is_staged = False

    def _eps(self) -> float:
        """Returns the machine epsilon of the coarsest dtype that the outputs are computed in."""
        types = [t.dtype for t in (*self.base, *self.session.replayer.subject.parameters) if t.is_floating_point()]
        types += [each.autocast[1] for each in self.session.recorded_step.calls if each.autocast[0]]
        return max((torch.finfo(each).eps for each in types), default=1e-7)

    @contextmanager
    def _jittered(self) -> Iterator[None]:
        """Context in which weights differ by one unit in the last place. The end of the replay restores them."""
        generator, eps = torch.Generator().manual_seed(0), self._eps()
        for p in self.session.replayer.subject.parameters:
            if p.is_floating_point():
                signs = torch.randint(2, p.shape, generator=generator, device="cpu").to(p) * 2 - 1
                p.data.mul_(1 + eps * signs)
        yield

    def confirmed(self, measure: Callable[[EvalPasses], Deviation | None]) -> Deviation | None:
        """Returns the result of ``measure``. A small deviation that shrinks in float64 is rounding and is reduced."""
        found = measure(self)
        if found is None or not found.is_real or found.amount > MAX_CONFIRMED_RATIO * found.limit:
            return found
        try:
            wide = measure(EvalPasses(self.session, "fp64"))
        except (RuntimeError, TypeError, NotImplementedError):  # a part of the model requires its dtype
            return found
        amount = 0.0 if wide is None else wide.amount
        return found if amount > ROUNDING_SHRINKAGE * found.amount else replace(found, amount=amount)

    def deviation(self, changed: Outputs, compare: Compare | None = None) -> Deviation:
        """Returns the distance of ``changed`` from the base."""
        return Deviation(max_distance(self.base, changed, compare), self.limit)

    def located(self, deviation: Deviation, change: Intervention, compare: Compare | None = None) -> Deviation:
        """Adds the first differing module and line to a deviation above the limit, by four more passes."""
        if not deviation.is_real:
            return deviation
        module = self._first_difference(change, compare or distance)
        line = None if module is None else self._first_difference(change, compare or distance, within=module)
        return replace(deviation, module=module, line=line)

    def _first_difference(self, change: Intervention, compare: Compare, within: str | None = None) -> str | None:
        traces = CallTrace(self.session, within), CallTrace(self.session, within)
        for trace, each in zip(traces, (UNCHANGED, change)):
            self.run(replace(each, model=trace.following, ops=trace.call))
        return traces[0].first_difference(traces[1], compare, self.limit)


def numbers_of(value: object) -> list[Tensor]:
    """Returns the floating-point tensors in a value. Complex numbers become two numbers each."""
    tensors = [torch.view_as_real(t) if t.is_complex() else t for t in plain(tensors_of(value))]
    return [t for t in tensors if t.is_floating_point()]


def max_distance(ones: Outputs, others: Outputs, compare: Compare | None = None) -> float:
    """Returns the largest distance between two lists of outputs."""
    pairs = [(a, b) for a, b in zip(ones, others)]
    return max(((compare or distance)(a, b) for a, b in pairs), default=0.0)


def distance(one: Tensor, other: Tensor) -> float:
    """Returns the largest difference of two tensors, in standard deviations of the first; 0 if the shapes differ."""
    if one.shape != other.shape or not one.numel():
        return 0.0
    wide = one.double()
    return float((wide - other.double()).abs().nan_to_num().max() / spread(wide))


def spread(wide: Tensor) -> Tensor:
    """Returns the standard deviation of the finite values, with a small lower bound; for one number its magnitude."""
    finite = wide[wide.isfinite()]
    if finite.numel() < 2:
        return finite.abs().sum() + 1e-12
    return finite.std() + 1e-12 + 1e-7 * finite.abs().max()


def at_rows(chosen: Callable[[int], Tensor], size: int, dim: int = 0) -> Compare:
    """Returns a function that compares the samples in the mask ``chosen(size)``, along the dimension of that size.

    If several dimensions have that size, ``dim`` must be one of them and is compared. Other tensors are not compared.
    """

    def compare(one: Tensor, other: Tensor) -> float:
        dims = [n for n, d in enumerate(one.shape) if d == size]
        if one.shape != other.shape or not dims or (len(dims) > 1 and dim not in dims):
            return 0.0
        at = dims[0] if len(dims) == 1 else dim
        rows = chosen(size).nonzero().flatten().to(one.device)
        delta = (one.double() - other.double()).index_select(at, rows).abs().nan_to_num()
        return float(delta.max() / spread(one.double())) if delta.numel() else 0.0

    return compare


MAX_ELEMENTS = 2**24  # Maximum number of elements that one trace keeps
Compare = Callable[[Tensor, Tensor], float]  # Returns the distance of two tensors that should be equal


@dataclass
class CallTrace:
    """Records inputs and outputs of all modules in call order. ``following`` is for ``Intervention.model``.

    Each tensor is kept with the module that is responsible if this tensor is the first to differ: for an output the
    module itself, for an input the enclosing module. If ``within`` names a module, the results of the torch functions
    that this module calls directly are recorded instead, each with its line. ``call`` is for ``Intervention.ops``.
    """

    session: ReplaySession
    within: str | None = None
    seen: list[tuple[str | None, list[Tensor]]] = field(default_factory=list)
    _elements: int = 0

    def __post_init__(self) -> None:
        self._stack = ModuleStack(self.session.modules)

    def following(self) -> AbstractContextManager[None]:
        return self._stack.following(self._enter, self._leave)

    def _enter(self, path: str, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        around = self._stack.paths[-2] if len(self._stack.paths) > 1 else path
        if self.within is None:
            self._keep(around, [args, kwargs])

    def _leave(self, path: str, module: nn.Module, output: object) -> None:
        if self.within is None:
            self._keep(path, output)

    def call(self, function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        """Calls the function, and records its result if the module ``within`` calls it directly."""
        result = function(*args, **kwargs)
        if self.within is not None and self._stack.innermost == self.within:
            self._keep(replayed_line(sys._getframe(1)), result)
        return result

    def _keep(self, path: str | None, value: object) -> None:
        tensors = [t.detach() for t in tensors_of(value, 3) if t.is_floating_point()]
        self._elements += sum(t.numel() for t in tensors)
        self.seen.append((path, [t.clone() for t in tensors] if self._elements < MAX_ELEMENTS else []))

    def first_difference(self, other: CallTrace, compare: Compare, limit: float) -> str | None:
        """Returns the module or line responsible for the first difference; None without one, or if the calls differ."""
        for (path, mine), (theirs_path, theirs) in zip(self.seen, other.seen):
            if path != theirs_path or len(mine) != len(theirs):
                return None
            if any(compare(a, b) > limit for a, b in zip(mine, theirs)):
                return path
        return None


SEQUENTIAL = (nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoder, nn.Conv1d)
"""Layers that relate the rows of an input on purpose if it is one sequence."""


def why_related(passes: EvalPasses) -> str:
    """Returns why the rows of the input may depend on each other on purpose; "" if each row is a sample."""
    session, size = passes.session, passes.session.size or 0
    inputs, modules = session.inputs, session.modules.values()
    if any(isinstance(m, _BatchNorm) and m.running_mean is None for m in modules):
        return "a normalisation uses the statistics of the batch in eval mode too"
    if _graph_of_nodes(inputs) is not None:
        return ""
    held = [t for m in modules for t in (*vars(m).values(), *m._buffers.values()) if isinstance(t, Tensor)]
    held += _global_constants(passes)
    if any(list(x.shape).count(size) > 1 or x.is_sparse for x in (*inputs, *held)):
        return "a matrix relates each sample to each"
    if any(not x.is_floating_point() and x.dim() == 2 and x.shape[0] == 2 != size for x in (*inputs, *held)):
        return "a list of edges relates samples"
    if any(_divides(x, size) for x in inputs):
        return "several sequences are packed into the rows"
    if is_batch(session):
        return "the model takes all samples as one set" if are_one_set(passes) else ""
    if inputs[0].dim() == 2 and inputs[0].is_floating_point() and any(isinstance(m, SEQUENTIAL) for m in modules):
        return "the input may be one sequence"
    if are_one_set(passes):
        return "the model takes all samples as one set"
    operations = [each for each in session.recorded_step.program if isinstance(each, Operation)]
    targets = [c.tensor for each in operations for c in constants_of((each.args, each.kwargs))]
    first = inputs[0]
    places = first.shape[0] * first.shape[1] if first.dim() > 1 else 0  # one target for each position, flattened
    lengths = {size, places, places - size}
    if not any(t.dim() and not t.requires_grad and int(t.shape[0]) in lengths for t in targets):
        return "no target says what a sample is"
    return ""


def _global_constants(passes: EvalPasses) -> list[Tensor]:
    """Returns the tensors without gradients that operations of the pass use and that no operation of it has made."""
    made: dict[int, object] = {}  # tensors by their ids, which are unique as long as the tensors are held
    found: list[Tensor] = []

    def call(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        found.extend(x for x in tensors_of((args, kwargs)) if id(x) not in made and not x.requires_grad)
        result = function(*args, **kwargs)
        made.update((id(x), x) for x in tensors_of(result))
        return result

    passes.run(Intervention(ops=call))
    return found


def _divides(x: Tensor, size: int) -> bool:
    """Returns True for offsets, lengths or sorted numbers of sequences that are packed into ``size`` rows."""
    if x.dim() != 1 or len(x) < 2 or x.dtype not in (torch.int32, torch.int64):
        return False
    if bool((x.diff() < 0).any()) or x[0] != 0:
        return len(x) != size and int(x.sum()) == size
    return int(x[-1]) == size or (len(x) == size and bool(x[-1] > 0))


def is_batch(session: ReplaySession) -> bool:
    """Returns True if the loader defines the samples."""
    return any(ids is not None and len(ids) == session.size for ids in session.ids)


def are_one_set(passes: EvalPasses) -> bool:
    """Returns True if a module gets all samples as one set (1, samples, ...): it relates them on purpose."""
    session = passes.session
    modules, size, found = ModuleStack(session.modules), session.size, False

    def enter(path: str, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        nonlocal found
        found |= any(each.dim() > 2 and each.shape[:2] == (1, size) for each in tensors_of((args, kwargs), 2))

    passes.run(Intervention(model=lambda: modules.following(enter, lambda *_: None)))
    return found


def replacing_with_neighbour(size: int, changed: int, dim: int = 0) -> InputHandler:
    """Handler for ``Intervention.inputs`` that replaces index ``changed`` of a dimension by a copy of its neighbour.

    The copy is detached, so that a derivative with respect to an input, as in a gradient penalty, does not connect
    samples.
    """

    def change(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or leaf.dim() <= dim or leaf.shape[dim] != size:
            return leaf
        leaf = leaf.clone()
        leaf.select(dim, changed).copy_(leaf.select(dim, (changed + 1) % size).detach())
        return leaf

    def handler(number: int, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        return tuple(change(x) for x in args), {name: change(x) for name, x in kwargs.items()}

    return handler


def neighbours(passes: EvalPasses) -> Deviation | None:
    """Returns the deviation of the other samples' outputs if one sample changes; None if it cannot be measured."""
    size, graphs = passes.session.size, _graph_of_nodes(passes.session.inputs)
    if graphs is not None:
        return _between_graphs(passes, graphs)
    if size is None or size < 3:
        return None
    for changed in (size // 2, 0):
        found = _deviation_along(passes, size, changed, 0)
        if found is not None:
            return found if not found.is_real or not _is_batch_second(passes) else None
    return None


MIN_GRAPHS = 3
GRAPH_FACTOR = 8.0  # Factor of changed features, so that a softmax or a sum over all graphs shows their change


def _graph_of_nodes(inputs: Sequence[Tensor]) -> Tensor | None:
    """Returns the input that numbers the graph of each node; None without one."""
    return next((found for x in inputs if (found := graph_of_nodes(x, inputs, MIN_GRAPHS)) is not None), None)


def _between_graphs(passes: EvalPasses, graphs: Tensor) -> Deviation | None:
    """Returns the deviation of the outputs of other graphs if the nodes of one graph change their features.

    None if no output has a row for each graph, or if the change has no effect on the output of that graph.
    """
    size, changed = int(graphs[-1]) + 1, int(graphs[-1]) // 2

    def change(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or leaf.shape[:1] != graphs.shape or torch.equal(leaf, graphs):
            return leaf
        is_changed = (graphs == changed).view(-1, *[1] * (leaf.dim() - 1))
        other = leaf.roll(int(is_changed.sum()), 0)
        return torch.where(is_changed, GRAPH_FACTOR * other if leaf.is_floating_point() else other, leaf)

    def rows(one: Tensor, other: Tensor, *, is_own: bool = False) -> float:
        if one.shape[:1] != (size,) or one.shape != other.shape:
            return 0.0
        is_changed = torch.arange(size, device=one.device) == changed
        return distance(one, torch.where((is_changed == is_own).view(-1, *[1] * (one.dim() - 1)), other, one))

    intervention = Intervention(inputs=change_leaves(change))
    pairs = [pair for pair in zip(passes.base, passes.run(intervention)) if list(pair[0].shape).count(size) == 1]
    own, others = (max((same(*pair) for pair in pairs), default=0.0) for same in (partial(rows, is_own=True), rows))
    if own <= (passes.limit if passes.limit < math.inf else 0.0):
        return None
    return passes.located(Deviation(others, passes.limit), intervention, rows)


def _deviation_along(passes: EvalPasses, size: int, changed: int, dim: int) -> Deviation | None:
    """Returns the deviation at the other indices of a dimension if index ``changed`` changes.

    None if the change has no effect at ``changed`` itself, or if no output has the dimension.
    """
    change = Intervention(inputs=replacing_with_neighbour(size, changed, dim))
    outputs = passes.run(change)
    own = at_rows(lambda n: torch.arange(n, device="cpu") == changed, size, dim)
    others = at_rows(lambda n: torch.arange(n, device="cpu") != changed, size, dim)
    kept = [n for n, each in enumerate(passes.base) if each.dim() > dim and list(each.shape).count(size) == 1]
    base, now = [passes.base[n] for n in kept], [outputs[n] for n in kept]
    if not kept or max_distance(base, now, own) <= (passes.limit if passes.limit < math.inf else 0.0):
        return None
    return passes.located(Deviation(max_distance(base, now, others), passes.limit), change, others)


def _is_batch_second(passes: EvalPasses) -> bool:
    """Returns True if the samples are along the second dimension, (T, B, ...), and no loader or target contradicts."""
    session = passes.session
    first = session.inputs[0]
    if first.dim() < 2 or is_batch(session):
        return False
    size = int(first.shape[1])
    if any(len(each.target) == session.size != size for each in losses_of(session) if each.target.dim() == 1):
        return False
    found = _deviation_along(passes, size, size // 2, 1) if size >= 3 and size != session.size else None
    return found is not None and not found.is_real


def place(passes: EvalPasses) -> Deviation | None:
    """Returns the deviation of the outputs of the samples if the batch is in another order.

    None if no loader defines the samples, or if an input may belong to positions in the batch instead of samples.
    """
    session, size = passes.session, passes.session.size or 0
    if size < 3 or not is_batch(session) or any(size in x.shape[1:] for x in session.inputs):
        return None
    calls = session.recorded_step.calls
    given = sum(len(constants_of((each.args, each.kwargs))) for each in calls)
    if given != sum(len(tensors_of((each.args, each.kwargs), 64)) for each in calls) and len(calls) > 1:
        return None
    if not all(x.dim() and x.shape[0] == size for x in session.inputs):
        return None

    def rolled(leaf: object) -> object:
        return leaf.roll(1, 0) if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == size else leaf

    change = Intervention(inputs=change_leaves(rolled))

    def moved_back(one: Tensor, other: Tensor) -> float:
        is_by_sample = one.shape == other.shape and one.dim() and one.shape[0] == size and size not in one.shape[1:]
        return distance(one, other.roll(-1, 0)) if is_by_sample else 0.0

    outputs = passes.run(change)
    found = passes.located(Deviation(max_distance(passes.base, outputs, moved_back), passes.limit), change, moved_back)
    pairs = [pair for pair in zip(passes.base, outputs) if pair[0].dim() > 1 and len(pair[0]) == size]
    return replace(found, is_reordered=found.is_real and bool(pairs) and all(_has_same_rows(*pair) for pair in pairs))


def _has_same_rows(one: Tensor, other: Tensor) -> bool:
    """Returns True if both have the same rows up to rounding, in any order, and few rows occur more than once."""
    rows, others = (each.flatten(1).double() for each in (one, other))
    if rows.shape != others.shape or len(rows) > MAX_COMPARED_ROWS:
        return False
    tolerance = SAME_ROW * spread(rows) * math.sqrt(rows.shape[1])
    is_equal = torch.cdist(rows, others) < tolerance
    return bool(is_equal.any(0).all() and is_equal.any(1).all()) and int(is_equal.sum()) < 2 * len(rows)


SAME_ROW, MAX_COMPARED_ROWS = 1e-4, 512  # Largest distance of equal rows, in standard deviations of the outputs
COMPARISONS = frozenset({"eq", "ne", "gt", "lt", "not_equal"})


def padding(passes: EvalPasses) -> tuple[Deviation | None, str]:
    """Returns the deviation of a row's outputs if its padding is removed, and what declares padding (``_declared``)."""
    for ids in passes.session.inputs:
        place = _padded_row(ids)
        if place is None:
            continue
        row, kept, filler = place
        length, is_at_end, rows = int(ids.shape[1]), kept.start == 0, [row, row]
        change = Intervention(inputs=_cut(length, kept.stop)) if is_at_end else Intervention(ops=_filled(kept))
        try:
            whole = passes.run(Intervention(rows=rows))
            other = passes.run(replace(change, rows=rows))
        except Exception:
            continue  # the model requires this length
        pairs = [pair for a, b in zip(whole, other) if (pair := _common(a, b, length, kept)) is not None]
        if pairs:
            amount = max_distance([a for a, _ in pairs], [b for _, b in pairs])
            return Deviation(amount, passes.limit), _declared(passes, ids, filler, is_at_end)
    return None, ""


def _padded_row(ids: Tensor) -> tuple[int, slice, int] | None:
    """Returns the row with the most padding, the positions without it, and the padding value."""
    if (found := padding_of(ids)) is None or (ids.is_floating_point() and not bool(found[1][:, -1].any())):
        return None
    filler, runs, length = found[0], found[1].sum(1), int(ids.shape[1])
    row = int(torch.where(length - runs >= 2, runs, 0).argmax())
    run = int(runs[row])
    kept = slice(0, length - run) if bool(found[1][row, -1]) else slice(run, length)
    return (row, kept, filler) if 2 <= run <= length - 2 else None


def _filled(kept: slice) -> Callable[[TorchFunction, Args, Kwargs], object]:
    """Returns a handler that gives the padding before ``kept`` the embedding of the first token after it.

    Cutting it off would also move the other tokens to other positions.
    """

    def call(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        result = function(*args, **kwargs)
        if function_name(function) == "embedding" and isinstance(result, Tensor) and result.shape[1:2] == (kept.stop,):
            ids = args[0]
            if isinstance(ids, Tensor) and bool((ids[:, : kept.start] == ids[:1, :1]).all()):
                result = result.clone()
                result[:, : kept.start] = result[:, kept.start : kept.start + 1]
        return result

    return call


def _cut(length: int, kept: int) -> InputHandler:
    """Returns a handler that cuts every (rows, length, ...) tensor after ``kept`` if all values after it are equal."""

    def change(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or leaf.dim() < 2 or leaf.shape[1] != length:
            return leaf
        tail = leaf[:, kept:]
        return leaf[:, :kept] if bool((tail == tail[:1, :1]).all()) else leaf

    return change_leaves(change)


def _common(whole: Tensor, other: Tensor, length: int, kept: slice) -> tuple[Tensor, Tensor] | None:
    """Returns the common part of two outputs: all of them, or the positions without padding."""
    size = kept.stop - kept.start
    if whole.shape == other.shape and (kept.start == 0 or (length not in whole.shape and whole.dim() < 3)):
        return whole, other
    dims = [n for n, (a, b) in enumerate(zip(whole.shape, other.shape)) if a == length and b in (length, size)]
    if len(dims) != 1:
        return None
    short, same = (x.narrow(dims[0], kept.start, size) if x.shape[dims[0]] == length else x for x in (whole, other))
    return (short, same) if short.shape == same.shape else None


def _declared(passes: EvalPasses, ids: Tensor, filler: int, is_at_end: bool) -> str:
    """Returns the part of the model or input that declares padding; "" without one.

    If it precedes the tokens, a mask that the model makes is none: it may be for the loss of a recurrent model.

    A zero vector for padding (``padding_idx``) or targets without padding are no declaration. Models that use padding
    on purpose (a convolution with a maximum, a mean, a recurrent layer) usually have them, too.
    """
    if ids.is_floating_point():
        kept = int(ids.shape[1]) - (ids == 0).flatten(2).all(2).flip(1).cumprod(1).sum(1)
        lengths = [x for x in passes.session.inputs if x.shape == kept.shape and not x.is_floating_point()]
        return "lengths among the inputs" if any(bool((x.to(kept) >= kept).all()) for x in lengths) else ""
    masks = [x for x in passes.session.inputs if x is not ids and x.shape == ids.shape]
    if any(bool((x == 1).all()) for x in masks) and _is_certain(ids if is_at_end else ids.flip(1), filler):
        return MASK_OF_ONES
    if any(int(((x != 0) != (ids != filler)).sum()) in (0, ids.numel()) for x in masks):
        return "a mask among the inputs"
    if not is_at_end:
        is_token = (ids != filler).long()
        positions = (is_token.cumsum(1) - 1).clamp(min=0)
        return "positions that begin after it" if any(torch.equal(x * is_token, positions) for x in masks) else ""
    return "a mask that the model makes" if _is_compared(passes, ids, filler) else ""


def _is_certain(ids: Tensor, filler: int) -> bool:
    """Returns True if half of the rows end in the padding id, and no row has it anywhere else."""
    is_end = (ids == filler).flip(1).long().cumprod(1).flip(1).bool()
    return 2 * int(is_end[:, -1].sum()) >= len(ids) and torch.equal(is_end, ids == filler)


def _is_compared(passes: EvalPasses, ids: Tensor, filler: int) -> bool:
    """Returns True if an operation compares the ids with the padding id."""
    found: list[bool] = []

    def call(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        if function_name(function).strip("_") in COMPARISONS and len(args) > 1 and isinstance(args[0], Tensor):
            is_it = isinstance(args[1], int | float) and args[1] == filler and args[0].shape == ids.shape
            found.append(is_it and torch.equal(args[0].to(ids), ids))
        return function(*args, **kwargs)

    passes.run(Intervention(ops=call))
    return any(found)


@replay(FunctionFacts, when="first", steps=1.5, value=4.0)
def function(session: ReplaySession) -> FunctionFacts:
    """Replays the forward pass in eval mode with one sample changed, and with the samples in another order.

    If no bit of the other outputs changes, these passes are enough. Otherwise the rounding is measured.
    """
    passes = EvalPasses(session, is_quick=True)
    with passes.in_one_stage():
        are_graphs = _graph_of_nodes(session.inputs) is not None
        found = FunctionFacts(
            neighbours=neighbours(passes), are_graphs=are_graphs, is_batch=is_batch(session), place=place(passes)
        )
    if not any(each.amount for each in (found.neighbours, found.place) if each is not None):
        return found
    with session.replayer.deadline.extended():
        passes = EvalPasses(session)
        with passes.in_one_stage():
            again, written = _again(passes)
            related = why_related(passes) if session.inputs else "no input"
            is_measured = not (again.is_real or related)
            return replace(
                found,
                written=written,
                neighbours=passes.confirmed(neighbours) if is_measured else None,
                related=related,
                place=passes.confirmed(place) if is_measured else None,
            )


@replay(PaddedFacts, when="first", value=2.0)
def padded(session: ReplaySession) -> PaddedFacts:
    """Replays the forward pass in eval mode without the padding of a row."""
    if not any(_padded_row(ids) for ids in session.inputs):
        return PaddedFacts()
    passes = EvalPasses(session, is_quick=True)
    with passes.in_one_stage():
        found = PaddedFacts(*padding(passes))
    if found.padding is None or not found.padding.amount:
        return found
    with session.replayer.deadline.extended():
        passes = EvalPasses(session)
        with passes.in_one_stage():
            again, _ = _again(passes)
            return PaddedFacts() if again.is_real else PaddedFacts(*padding(passes))


@contextmanager
def other_random_numbers() -> Iterator[None]:
    """Context with another random seed. The end of the replay restores the generators."""
    torch.manual_seed(0x5EED)
    yield


def _again(passes: EvalPasses) -> tuple[Deviation, tuple[str, ...]]:
    """Returns the deviation of a second call with other random numbers, and the buffers that the calls wrote to."""
    before = {name: buffer.clone() for name, buffer in _buffers(passes.session).items()}
    passes.run()
    again = passes.deviation(passes.run(Intervention(fresh_rng=True, model=other_random_numbers)))
    now = _buffers(passes.session)
    same = {n for n in before.keys() & now.keys() if torch.equal(before[n].nan_to_num(), now[n].nan_to_num())}
    return again, tuple([name for name in now if name not in same][:8])


def _buffers(session: ReplaySession) -> dict[str, Tensor]:
    named = ((f"{path}.{name}".lstrip("."), b) for path, m in session.modules.items() for name, b in m._buffers.items())
    return {name: buffer for name, buffer in named if buffer is not None}
