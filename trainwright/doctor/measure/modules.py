"""Examines modules in the live loop: modes, constant outputs, embeddings, repeated modules."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from trainwright.checkpoint.names import named_modules, named_parameters
from trainwright.doctor.facts.layers import ModulesFacts, OutputSpread, RepeatedModule
from trainwright.doctor.measure.tensors import sampled
from trainwright.recorder.calls import Hook, is_compiled
from trainwright.recorder.gradients import owned_by
from trainwright.recorder.graph import graph_behind, leaves_among
from trainwright.recorder.listener import has_listeners
from trainwright.recorder.pausable import without_modes
from trainwright.recorder.plain_tensors import plain
from trainwright.recorder.probes import Probe, WatchedObjects, WatchSite
from trainwright.recorder.program import Operation, RecordedStep, constants_of, tensors_of
from trainwright.recorder.user_types import Args, Kwargs
from trainwright.replay.modules import ModuleStack

FLAT_NODES = ("RoundBackward", "FloorBackward", "CeilBackward", "TruncBackward", "SignBackward")
"""Autograd nodes whose derivative is 0 everywhere."""
MIN_ROWS = 4
MIN_WIDTH = 8  # Minimum size of vectors whose spread is measured
MAX_RELATIVE_ROUNDING = 1e-4  # Relative to the largest output. A normalization over one value leaves rounding of 1e-5.
NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm)
_MEASURED = (_DropoutNd, *NORMS)

EARLY_STEPS = frozenset({1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64})
"""Examined steps. Later, the step after every INTERVAL_STEPS-th one is examined, until FREQUENT_UNTIL_STEP."""
INTERVAL_STEPS = 32
FREQUENT_UNTIL_STEP = 512
LATER_INTERVAL_STEPS = 128
"""Interval of examined steps after FREQUENT_UNTIL_STEP. An examination takes about 10 us for each module."""
MAX_PASSES = 128  # Maximum number of examined passes per step. More passes through the same model add no information.


class ModuleProbe(Probe):
    """Keeps hooks on all modules during the training passes of examined steps.

    A compiled model is not hooked, because it would be compiled again. A sharded model is not hooked, because each rank
    has only a part. ``is_hooked``: the current pass, or else the last one, is examined.
    """

    def __init__(self, watched: WatchedObjects) -> None:
        self.watched, roots = watched, watched.subject.roots
        self.modules = dict(named_modules(roots))
        self.names = {id(p): name for name, p in named_parameters(roots)}
        self.owned = {id(p) for optimizer in watched.subject.optimizers for p in owned_by(optimizer)}
        kinds = {type(each).__name__ for each in self.modules.values()}
        is_divided = any(map(is_traceable_wrapper_subclass, watched.subject.parameters))
        with_wrappers = (module for root in roots for module in root.modules())
        self._is_off = is_divided or "FullyShardedDataParallel" in kinds or any(map(is_compiled, with_wrappers))
        self.num_examined, self.is_examining, self.step = 0, not self._is_off, 0
        self._steps_before: int | None = None  # number of steps before the watch began
        self._open, self._is_following = ExitStack(), False
        self._passes, self.is_hooked = 0, False
        self.follow(self.modules)

    def follow(self, modules: Mapping[str, nn.Module]) -> None:
        """Sets the modules that are hooked from the next pass on."""
        self._stack = ModuleStack({p: m for p, m in modules.items() if not isinstance(m, torch.jit.ScriptModule)})
        self.stack = self._stack.paths

    def begin(self, site: WatchSite) -> None:
        """Called before the first step."""

    def entered(self, path: str, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """A hooked module is called in an examined step."""

    def left(self, path: str, module: nn.Module, output: object) -> None:
        """The call has ended. ``output`` is None if it raised."""

    def ended(self, step: RecordedStep) -> None:
        """An examined step has ended."""

    def on_forward(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if self._is_following:
            self._stop_following()
        self.is_hooked = self.is_examining and torch.is_grad_enabled() and self._passes < MAX_PASSES
        if self.is_hooked:
            self._passes += 1
            self._is_following = True
            leave = None if type(self).left is ModuleProbe.left else self.guarded(self.left)
            self._open.enter_context(self._stack.following(self.guarded(self.entered), leave, but=root))

    def on_output(self, root: nn.Module, output: object) -> None:
        if self._is_following:
            self._stop_following()

    def _stop_following(self) -> None:
        self._is_following = False
        self._open.close()

    def guarded(self, call: Callable[..., None]) -> Callable[..., None]:
        """Returns a function that calls ``call`` outside of all modes. The probe stops if that raises."""

        def called(*args: object) -> None:
            if self.failed is None:
                try:
                    with without_modes():
                        call(*args)
                except Exception as error:
                    self.fail(error)

        return called

    def on_closed(self, step: RecordedStep) -> None:
        self._steps_before = step.step - 1 if self._steps_before is None else self._steps_before
        taken = step.step - self._steps_before
        self._passes = 0
        if self.is_examining:
            self._stop_following()
            self.num_examined += 1
            self.step = step.step
            self.ended(step)
        every = INTERVAL_STEPS if taken <= FREQUENT_UNTIL_STEP else LATER_INTERVAL_STEPS
        is_due = taken + 1 in EARLY_STEPS or (taken >= 64 and step.step % every == 0)
        self.is_examining = not self._is_off and is_due

    def end(self, error: BaseException | None) -> None:
        self._stop_following()

    def fail(self, error: Exception) -> None:
        super().fail(error)
        self._open.close()  # a failed probe is not called again


def rows_of(tensor: Tensor, most: int = 8) -> Tensor:
    """Returns the first rows, each flattened to one dimension."""
    rows = tensor.detach()[:most]
    return rows.reshape(len(rows), -1)


class Modules(ModuleProbe):
    """Examines modules. Synchronizes with a GPU only when the facts are read."""

    name = ModulesFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        super().__init__(watched)
        self._varies: dict[str, tuple[Tensor, Tensor]] = {}  # whether inputs and outputs vary in this pass, by module
        self._given: dict[str, Tensor] = {}  # whether the inputs vary in this pass
        self._wipes: dict[str, list[Tensor]] = {}  # whether outputs are constant and inputs are not, for each pass
        self._single = ""
        self._first: Tensor | None = None  # rows of the first input of the first pass
        self._same: list[Tensor] = []
        self._spread: Tensor | None = None
        self._spreads: list[tuple[int, Tensor]] = []
        self._noisy: Counter[str] = Counter()
        self._learning: set[str] = set()  # dropouts that were called with gradients
        self._drifting: Counter[str] = Counter()
        self._first_values: dict[str, Tensor] = {}
        self._lists = {p: m for p, m in self.modules.items() if isinstance(m, nn.ModuleList | nn.Sequential)}
        self._repeats = {id(m) for each in self._lists.values() for m, n in _entries(each).items() if n > 1}
        self._made: dict[str, set[Node]] = {}  # nodes of the outputs of repeated modules in this pass
        self._chained: set[int] = set()
        self._flat, self._behind = "", set[str]()
        self._others: list[str] = []
        self._reported = 0
        self._handles: list[RemovableHandle] = []
        self._searches = False  # the outputs of the model are constant, so the first module with such outputs is sought
        self.follow({p: m for p, m in self.modules.items() if isinstance(m, _MEASURED) or id(m) in self._repeats})

    def on_forward(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        super().on_forward(root, args, kwargs)
        for each in (self._varies, self._given, self._made):
            each.clear()
        if self.is_hooked and (varies := _varies((args, kwargs))) is not None:
            self._given[""] = varies
            given = next((rows_of(t) for t in plain(tensors_of((args, kwargs), 3)) if _has_rows(t)), None)
            if given is not None:
                first = self._first = given.clone() if self._first is None else self._first
                is_like = first.shape == given.shape
                self._same.append(torch.eq(first, given).all() if is_like else varies.new_zeros(()))

    def entered(self, path: str, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if self._searches and path and (varies := _varies((args, kwargs))) is not None:
            self._given[path] = varies
        if isinstance(module, _DropoutNd) and module.training and module.p > 0:
            self._learning.add(path) if torch.is_grad_enabled() else self._noisy.update([path])
        elif isinstance(module, _NormBase) and module.training and module.running_mean is not None:
            self._drifting[path] += module.weight is not None
        is_norm, is_repeated = isinstance(module, nn.LayerNorm | nn.GroupNorm), path in self._made
        given = plain(tensors_of((args, kwargs), 2)) if is_norm or is_repeated else []
        if is_norm and given and not self._single and _normalises_one_value(module, given[0]):
            self._single = path
        if is_repeated and any(node in self._made[path] for node in graph_behind(given, most=64)):
            self._chained.add(id(module))

    def left(self, path: str, module: nn.Module, output: object) -> None:
        if path in self._given and path not in self._varies and (varies := _varies(output)) is not None:
            self._varies[path] = self._given[path], varies
        if id(module) in self._repeats:
            self._made.setdefault(path, set()).update(t.grad_fn for t in tensors_of(output, 2) if t.grad_fn is not None)

    def on_output(self, root: nn.Module, output: object) -> None:
        super().on_output(root, output)
        if self.is_examining and self._given and output is not None:
            with without_modes():  # these operations are not part of the loss, which is being recorded
                self._record_output(output)

    def _record_output(self, output: object) -> None:
        root_varies = _varies(output)
        if root_varies is not None and "" in self._given:
            self._varies[""] = self._given[""], root_varies
        for path, (before, after) in self._varies.items():
            self._wipes.setdefault(path, []).append(before & ~after)
        vectors = [t for t in plain(tensors_of(output, 3)) if t.dim() == 2 and _has_rows(t) and t.is_floating_point()]
        if vectors and vectors[0].shape[1] >= MIN_WIDTH and len(vectors[0]) >= 8:
            rows = rows_of(vectors[0], 64).float()
            self._spread = rows.std(0).mean() / rows.pow(2).mean().sqrt().clamp(min=1e-12)
        self._made.clear()

    def on_backward(self, losses: tuple[Tensor, ...], options: Kwargs) -> None:
        if self.is_examining and self.num_examined < 2:
            # parameters that the loss reaches only through nodes with derivative 0
            near = graph_behind(losses, stops=FLAT_NODES)
            if flat := [each for each in near if type(each).__name__.startswith(FLAT_NODES)]:
                self._flat = type(flat[0]).__name__.partition("Backward")[0].lower()
                behind = leaves_among(graph_behind(flat)) - leaves_among(near)
                self._behind = {self.names[id(p)] for p in behind if id(p) in self.names}

    def ended(self, step: RecordedStep) -> None:
        if self._spread is not None and not _has_data(step):
            self._spreads.append((step.step, self._spread))
        self._spread = None
        for path in {*self._noisy, *self._drifting}:
            if (frozen := self._frozen_around(path)) is not None:
                self._first_values.setdefault(frozen, _first_values(self.modules[frozen]))
        if self.num_examined == 1:
            self._examine_others()

    def _examine_others(self) -> None:
        """Finds untrained modules with active dropout, such as a teacher, in the variables of the loop."""
        known = {id(m) for m in self.modules.values()}
        for module in self.watched.modules():
            drops = any(isinstance(m, _DropoutNd) and m.training and m.p > 0 for m in module.modules())
            if id(module) in known or not drops or not self._is_frozen(module):
                continue
            kind, first = type(module).__name__, _first_values(module)

            def called(module: nn.Module, args: Args, kind: str = kind, first: Tensor = first) -> None:
                is_used = has_listeners() and module.training and not torch.is_grad_enabled() and self.is_examining
                if is_used and kind not in self._others and torch.equal(_first_values(module), first):
                    self._others.append(kind)

            self._handles.append(module.register_forward_pre_hook(Hook(module, called)))

    def _is_frozen(self, module: nn.Module) -> bool:
        parameters = list(module.parameters())
        return bool(parameters) and not any(id(p) in self.owned for p in parameters)

    def _frozen_around(self, path: str) -> str | None:
        """Returns the outermost frozen module around ``path`` that has weights outside of normalizations; else None."""
        found = None
        while path:
            path = path.rpartition(".")[0]
            if not self._is_frozen(self.modules[path]):
                return found
            inside = [m for m in self.modules[path].modules() if not isinstance(m, NORMS)]
            if any(True for m in inside for _ in nn.Module.parameters(m, recurse=False)):
                found = path
        return found

    def _around_all(self, paths: set[str]) -> tuple[str, ...]:
        """Returns the frozen modules around ``paths`` whose weights have not moved since their first observation."""
        around = {frozen for path in paths if (frozen := self._frozen_around(path)) in self._first_values}
        first = self._first_values
        return tuple(sorted(p for p in around if p and torch.equal(_first_values(self.modules[p]), first[p])))

    def facts(self) -> ModulesFacts | None:
        if not self.num_examined or self._reported == self.num_examined:
            return None
        self._reported = self.num_examined
        wiped = {path: bool(torch.stack(each).all()) for path, each in self._wipes.items()}
        is_whole = wiped.get("", False)
        if is_whole and not self._searches:
            self._searches = True
            self.follow(self.modules)
        constant = next((p for p in self._wipes if wiped[p] and p), "") if is_whole else None
        constant = self._single or constant
        return ModulesFacts(
            looks=self.num_examined,
            last=self.step,
            same_inputs=len(self._same) > 1 and bool(torch.stack(self._same[1:]).all()),
            constant=constant,
            is_whole=is_whole,
            constant_kind=type(self.modules[constant]).__name__ if constant is not None else "",
            spreads=tuple(OutputSpread(step=n, spread=float(each)) for n, each in self._spreads),
            noisy=(*self._around_all({*self._noisy} - self._learning), *self._others) if self.num_examined > 1 else (),
            drifting=self._around_all({*self._drifting}) if self.num_examined > 1 else (),
            repeated=tuple(
                RepeatedModule(path=path, times=n, is_chained=id(m) in self._chained)
                for path, container in self._lists.items()
                for m, n in _entries(container).items()
                if n > 1
            ),
            flat=self._flat,
            behind_flat=tuple(sorted(self._behind))[:32],
        )

    def end(self, error: BaseException | None) -> None:
        super().end(error)
        for handle in self._handles:
            handle.remove()


def _entries(container: nn.Module) -> Counter[nn.Module]:
    """Counts the entries of a container that are modules with parameters."""
    return Counter(m for m in container._modules.values() if m is not None and any(True for _ in m.parameters()))


def _normalises_one_value(module: nn.Module, x: Tensor) -> bool:
    """Returns True if each normalized group has one value, so that the output is constant."""
    if isinstance(module, nn.GroupNorm):
        return x.dim() > 1 and x.numel() == x.shape[0] * module.num_groups
    return isinstance(module, nn.LayerNorm) and math.prod(module.normalized_shape) == 1


def _has_rows(tensor: Tensor) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] >= MIN_ROWS and tensor.numel() > 0


def _varies(value: object) -> Tensor | None:
    """Returns a 0-d bool: True if rows differ beyond rounding. None without a tensor of several rows."""
    tensor = next((t for t in plain(tensors_of(value, 3)) if _has_rows(t)), None)
    if tensor is None or tensor.is_complex() or (tensor.is_floating_point() and tensor.itemsize < 2):  # float8
        return None
    rows = rows_of(tensor)
    if not tensor.is_floating_point():
        return (rows != rows[:1]).any()
    room = MAX_RELATIVE_ROUNDING if tensor.dtype in (torch.float32, torch.float64) else 0.0
    return ~((rows - rows[:1]).abs().amax() <= room * rows.abs().amax())


def _has_data(step: RecordedStep) -> bool:
    """Returns True if the loss of a step uses data besides the model's inputs."""
    operations = [each for each in step.program if isinstance(each, Operation)]
    return any(c.tensor.numel() > 1 for each in operations for c in constants_of((each.args, each.kwargs)))


def _first_values(module: nn.Module) -> Tensor:
    """Returns some values of the first weight. Its version counter does not count assignments to ``data``."""
    return sampled(next(module.parameters()), 64)
