"""Examines the structure and the weights of the model once, in a replay of the first examined step."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from trainwright.doctor.facts.layers import FirstLossFacts, SymmetryFacts
from trainwright.doctor.facts.wiring import ActivatedFacts, Chain, GraphCut, SavedFacts, WiringFacts
from trainwright.doctor.measure.layers import MAPS
from trainwright.recorder.graph import leaves_of
from trainwright.recorder.program import tensors_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.classified import classes_in
from trainwright.replay.experiments import replay
from trainwright.replay.inspector import StepInspector, checksum, is_in_custom_function
from trainwright.replay.replayer import Intervention, NotReplayable
from trainwright.replay.session import ReplaySession
from trainwright.replay.trace import replayed_line


class Consumers:
    """Collects, for each cut of the graph, the weights that are applied to values computed from the cut tensor.

    A value that no trained weight is applied to is not on the path to the loss: a teacher's output, a target, a factor.
    ``names`` are the names of the parameters, by their ids.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._weights = {number: {name} for number, name in names.items()}
        self._made_of: dict[int, set[int]] = {}
        self._kept: list[Tensor] = []  # holds references so that no id is reused
        self._found: defaultdict[int, set[str]] = defaultdict(set)
        self._left: list[tuple[Tensor, set[int]]] = []

    def leave(self, tensor: Tensor, cut: int | None) -> None:
        """Records that the values of a tensor leave torch, for example as a NumPy array."""
        cuts = self._made_of.get(id(tensor), set()) | ({cut} if cut is not None else set())
        self._left += [(tensor.detach(), cuts)] if cuts else []

    def _returned(self, made: Tensor, is_copied: bool) -> set[int]:
        """Returns the cuts of a tensor that left torch if ``made``, which was not computed in torch, has its values.

        ``is_copied``: an equal number of rows is enough.
        """
        if made.requires_grad or not made.is_floating_point() or id(made) in self._made_of or made.numel() < 2:
            return set()
        for left, cuts in reversed(self._left):
            same = made.numel() == left.numel() and bool((made.flatten() == left.flatten().to(made)).all())
            if same or (is_copied and made.shape[:1] == left.shape[:1]):
                self._made_of[id(made)] = cuts
                self._kept.append(made)
                return cuts
        return set()

    def record(self, inputs: list[Tensor], result: object, cut: int | None) -> None:
        """Records a function call. ``cut`` is the number of the cut that the call makes; None if it makes none."""
        for each in inputs if self._left else ():
            # memory that torch cannot resize: ``torch.from_numpy``, which is no torch function to the recorder
            self._returned(each, each.layout is torch.strided and not each.untyped_storage().resizable())
        if self._left and not inputs and isinstance(result, Tensor):
            self._returned(result, True)
        cuts = {number for t in inputs for number in self._made_of.get(id(t), ())}
        weights = {name for t in inputs for name in self._weights.get(id(t), ())}
        for number in cuts:
            self._found[number] |= weights
        cuts |= {cut} if cut is not None else set()
        of_weights = weights if inputs and all(id(t) in self._weights for t in inputs) else set()
        for made in tensors_of(result) if cuts or of_weights else ():
            self._kept.append(made)
            if cuts:
                self._made_of[id(made)] = self._made_of.get(id(made), set()) | cuts
            else:
                self._weights.setdefault(id(made), of_weights)

    def of(self, cut: int) -> set[str]:
        return self._found[cut]


_MOVES = {"view", "reshape", "flatten", "unflatten", "contiguous", "permute", "transpose", "squeeze", "unsqueeze"}
_MOVES |= {"dropout", "to", "float", "clone", "movedim", "expand", "rearrange"}
"""Functions after which a linear map is still linear."""
_INTEGERS = {"int", "long", "short", "byte", "char", "to", "type", "argmax", "argmin", "argsort", "multinomial"}
"""Functions that return integers, which have no graph."""
_LEAVE_TORCH = {"numpy", "tolist", "__array__"}
"""Functions that return the values of a tensor as an object of another library, or as Python numbers."""
_QUERIES = {"size", "dim", "__get__", "numel", "stride", "is_contiguous", "element_size", "is_floating_point"}
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, getattr(nn, "RMSNorm", nn.LayerNorm))


class _Wiring(StepInspector):
    """Collects the connections of layers and parameters in one forward and backward pass."""

    def __init__(self, session: ReplaySession) -> None:
        super().__init__(session)
        self._from: dict[int, str] = {}  # the weight of the linear map that made a tensor, up to views
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._kept: list[Tensor] = []  # holds references so that no id is reused
        self._uses: Counter[str] = Counter()
        self.chains: list[Chain] = []
        self._cuts: list[tuple[str, str, str | None, list[Tensor]]] = []
        self._consumers = Consumers(self.names)
        self.called: list[str] = []
        self.leaves: dict[int, Tensor] = {}

    def on_enter(self, path: str, module: nn.Module, inputs: list[Tensor], in_backward: bool) -> None:
        if path not in self.called:
            self.called.append(path)

    def on_leave(self, path: str, module: nn.Module, output: object, in_backward: bool) -> None:
        if in_backward or self.stack:
            return
        self._from.clear()  # the last layer of a generator and the first of its critic are not a chain
        self.leaves.update({id(leaf): leaf for leaf in leaves_of(tensors_of(output))})

    def on_function(self, name: str, args: Args, kwargs: Kwargs, result: object) -> None:
        inputs = tensors_of([args, kwargs], 3)
        before = len(self._cuts)
        self._record_cut(name, inputs, result)
        if name in _LEAVE_TORCH and inputs:
            self._consumers.leave(inputs[0], before if len(self._cuts) > before else None)
        self._consumers.record(inputs, result, before if len(self._cuts) > before else None)
        if not isinstance(result, Tensor) or not self.stack:
            return
        if name in MAPS and len(inputs) > 1:
            self._record_linear(inputs, result)
        elif name in _MOVES and inputs and id(inputs[0]) in self._from:
            self._tag(result, self._from[id(inputs[0])])
        elif name not in _QUERIES:
            self._uses.update({self._from[id(t)] for t in inputs if id(t) in self._from})

    def _tag(self, tensor: Tensor, weight: str) -> None:
        self._from[id(tensor)] = weight
        self._kept.append(tensor)

    def _record_linear(self, inputs: list[Tensor], result: Tensor) -> None:
        """Records a linear layer. It continues a chain if its input is the output of another one."""
        x, weight = inputs[:2]
        name = self.names.get(id(weight))
        if name is None:
            return
        width = x.shape[-1] if weight.dim() == 2 else x.shape[1 - weight.dim()]
        self._shapes[name] = (int(weight.shape[0]), int(width), *map(int, weight.shape[2:]))
        plain = weight.requires_grad and weight.shape[1] == width
        before = self._from.get(id(x))
        if before is not None and before != name:
            shapes = {"first_shape": self._shapes[before], "second_shape": self._shapes[name]}
            chain = Chain(first=before, second=name, **shapes)
            if plain and chain not in self.chains:
                self.chains.append(chain)
            self._uses[before] += 1
        if plain:
            self._tag(result, name)

    def _record_cut(self, name: str, inputs: list[Tensor], result: object) -> None:
        """Records a tensor without a graph that is computed from tensors with one, unless it is an index."""
        if isinstance(result, Tensor):
            if result.requires_grad or not (result.is_floating_point() or name in _INTEGERS):
                return
        elif name not in _LEAVE_TORCH:
            return
        sources = [t for t in inputs if t.requires_grad]
        if sources and len(self._cuts) < 256:
            how = "no_grad" if not torch.is_grad_enabled() else "data" if name == "__get__" else name
            line = replayed_line(sys._getframe(1)) if self.stack else None
            self._cuts.append((how, self.stack[-1] if self.stack else "", line, sources))

    def unbroken_chains(self) -> list[Chain]:
        """Returns pairs of linear layers in which only the second uses the output of the first."""
        return [chain for chain in self.chains if self._uses[chain.first] <= 1]

    def cuts(self, unreached: set[str]) -> list[GraphCut]:
        """Returns the cuts of the graph with unreached parameters behind them, nearest to the loss first.

        ``GraphCut.aside`` is True if also the weights that are applied to values computed from the cut are unreached.
        """
        cuts: list[GraphCut] = []
        for number, (how, path, line, sources) in reversed(list(enumerate(self._cuts))):
            below = {self.names[id(p)] for p in leaves_of(sources) if id(p) in self.names}
            behind = sorted(below & unreached)
            if behind and not any(set(behind) <= set(cut.behind) for cut in cuts):
                owners = {name.rpartition(".")[0] for name in behind}
                last = next((path for path in reversed(self.called) if path in owners), None)
                aside = self._consumers.of(number) | below <= unreached
                cut = GraphCut(how=how, inside=path, line=line, last=last, behind=tuple(behind), aside=aside)
                cuts.append(cut)
        return cuts


@replay(WiringFacts, when="first", steps=1.3, value=3.0)
def structure(session: ReplaySession) -> WiringFacts:
    """Returns counts of parameters, cuts of the graph, unregistered tensors, and linear layers in a row."""
    wiring = _Wiring(session)
    # read before the pass, in which a module may store an input (for a derivative)
    held = {id(each) for m in session.modules.values() for value in list(vars(m).values()) for each in _held(value)}
    with session.live():
        result = wiring.run()
        owned = {id(p) for o in session.optimizers for g in o.param_groups for p in g["params"]}
        subject = session.replayer.subject
        trained = {wiring.names[id(p)] for p in subject.parameters if p.requires_grad and id(p) in owned}
        unreached = {name for name in trained if result.grads.get(name) is None}
        cuts = wiring.cuts(unreached)
    idle = unreached.difference(*(cut.behind for cut in cuts))
    outside = {name: t for name, t in _unregistered(session, wiring.leaves).items() if id(t) in held}
    norms = [m for m in session.modules.values() if isinstance(m, _NORMS)]
    of_norms = {id(p) for module in norms for p in nn.Module.parameters(module, recurse=False)}
    others = [p for p in session.parameters.values() if id(p) not in of_norms]
    return WiringFacts(
        trained=len(trained),
        trained_beside_norms=sum(id(p) in owned and p.requires_grad for p in others),
        frozen_beside_norms=sum(not p.requires_grad for p in others),
        cuts=tuple(cuts),
        idle=tuple(name for name in sorted(idle) if _is_in_use(name, wiring.called, session.modules)),
        unregistered=tuple(sorted({name.partition("#")[0] for name in outside})),
        unregistered_values=sum(t.numel() for t in outside.values()),
        chains=tuple(wiring.unbroken_chains()),
    )


def _is_in_use(name: str, called: Sequence[str], modules: Mapping[str, nn.Module]) -> bool:
    """Returns True if a module of the user that should use this weight was called.

    Not for layers in a list of which others are called, such as experts, and modules of libraries.
    """
    path = name.rpartition(".")[0]
    while path and not any(each == path or each.startswith(f"{path}.") for each in called):
        path = path.rpartition(".")[0]
    is_called = path in called
    while path and type(modules[path]).__module__.startswith("torch."):
        path = path.rpartition(".")[0]
    kind = type(modules[path]) if path in modules else nn.Module
    return is_called and "site-packages" not in str(getattr(sys.modules.get(kind.__module__), "__file__", ""))


def _unregistered(session: ReplaySession, leaves: dict[int, Tensor]) -> dict[str, Tensor]:
    """Returns leaves of the graph that a list, dict or attribute of a module holds without registration."""
    known = {id(p) for p in session.replayer.subject.parameters} | {id(x) for x in session.inputs}
    strange = {key: leaf for key, leaf in leaves.items() if key not in known}
    found: dict[str, Tensor] = {}
    for path, module in session.modules.items() if strange else ():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules") or "hooks" in name:
                continue
            for leaf in _held(value):
                if strange.pop(id(leaf), None) is not None:
                    found[f"{'.'.join(p for p in (path, name) if p)}#{len(found)}"] = leaf
    return found


def _held(value: object, depth: int = 4) -> Iterator[Tensor]:
    """Yields the tensors in an attribute: itself, parameters of a module, items of containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif depth and isinstance(value, list | tuple | set):
        for each in value:
            yield from _held(each, depth - 1)
    elif depth and isinstance(value, dict):
        yield from _held(list(value.values()), depth - 1)


_Packed: TypeAlias = tuple[Tensor, Tensor | None, str]
"""A saved tensor, its checksum (None: not checked), and the module that saved it."""


class _Checksums(StepInspector):
    """Computes checksums of the tensors that the graph saves and of the output of every module."""

    def __init__(self, session: ReplaySession) -> None:
        super().__init__(session)
        self.modified: list[tuple[str, Tensor]] = []
        self._in_forward: dict[str, list[Tensor]] = {}
        self._in_backward: list[tuple[str, Tensor]] = []
        norms = {path: m for path, m in session.modules.items() if isinstance(m, _NormBase)}
        self._norms = norms.keys()
        self._written = {b.data_ptr() for m in norms.values() for b in m.buffers(recurse=False)}

    def on_leave(self, path: str, module: nn.Module, output: object, in_backward: bool) -> None:
        sums = [checksum(t) for t in tensors_of(output) if t.is_floating_point()]
        # a custom Function, such as an adjoint, may run the module with other inputs
        if not sums or (in_backward and is_in_custom_function()):
            return
        if in_backward:
            self._in_backward.append((path, sums[0]))
        else:
            self._in_forward.setdefault(path, []).append(sums[0])

    def pack(self, tensor: Tensor) -> _Packed:
        saved = tensor.detach()
        path = self.stack[-1] if self.stack else ""
        # a running statistic or a copy of it
        is_statistic = path in self._norms and tensor.dim() == 1 and not tensor.requires_grad
        skip = not tensor.is_floating_point() or tensor.is_sparse or is_statistic or tensor.data_ptr() in self._written
        return saved, None if skip else checksum(saved), path

    def unpack(self, packed: _Packed) -> Tensor:
        saved, before, path = packed
        if before is not None:
            self.modified.append((path, _differ(before, checksum(saved))))
        return saved

    def first_difference(self) -> str | None:
        """Returns the first module whose output under activation checkpointing differs from the forward pass."""
        for path, sums in self._in_backward:
            before = self._in_forward.get(path, [])
            if before and all(bool(_differ(each, sums)) for each in before):
                return path
        return None


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Returns a 0-d bool on the device: True if checksums differ by more than the order of summation explains."""
    return ((one - other).abs() > 1e-5 * (one.abs() + one[1].abs().sqrt())).any()


@replay(SavedFacts, when="first", memory=2.0)
def integrity(session: ReplaySession) -> SavedFacts:
    """Examines whether backward reads the saved values, and whether checkpointing repeats the forward pass."""
    with session.live():
        checksums = _Checksums(session)
        with torch.autograd.graph.saved_tensors_hooks(checksums.pack, checksums.unpack):
            checksums.run()
        modified = [path for path, flag in checksums.modified if bool(flag)]
        differs = checksums.first_difference()
    kind = "" if differs is None else type(session.modules[differs]).__name__
    return SavedFacts(modified=tuple(modified[:8]), differs=differs, kind=kind)


MIN_UPDATES = 8  # Minimum number of updates on one batch
MAX_UPDATES = 128  # Maximum number of updates on one batch. The gain from depth appears late.


@replay(ActivatedFacts, when="requested", steps=240.0)
def activation_between(session: ReplaySession) -> ActivatedFacts:
    """Updates on one batch for half a second: unchanged, and with activations between linear layers in a row."""
    wiring = _Wiring(session)
    with session.live():
        wiring.run(upto="forward")
    chosen = {id(session.parameters[each.first]) for each in wiring.unbroken_chains()}

    def change(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        output = function(*args, **kwargs)
        return output.relu() if any(id(x) in chosen for x in tensors_of(args, 2)[1:2]) else output

    begin_s = time.perf_counter()
    session.run()
    steps = max(MIN_UPDATES, min(MAX_UPDATES, int(0.5 / (time.perf_counter() - begin_s))))
    was = session.train(steps, repeat=True)
    now = session.train(steps, Intervention(ops=change), repeat=True)
    if len(now) < steps or len(was) < steps:
        raise NotReplayable("the step could not be replayed")
    return ActivatedFacts(unchanged=was[-1], activated=now[-1])


LARGE_WEIGHT_RATIO = 2.5  # Weights above this multiple of the usual scale are too large


class _Outputs(StepInspector):
    """Collects the outputs of the models, with their graph, and the class counts of cross-entropies."""

    def __init__(self, session: ReplaySession) -> None:
        super().__init__(session)
        self.outputs: list[Tensor] = []
        self.classes: list[int] = []

    def on_leave(self, path: str, module: nn.Module, output: object, in_backward: bool) -> None:
        if not self.stack and not in_backward:
            self.outputs += [t for t in tensors_of(output) if t.requires_grad and t.is_floating_point()]

    def on_function(self, name: str, args: Args, kwargs: Kwargs, result: object) -> None:
        if not self.stack and name != "nll_loss" and (classes := classes_in(name, args, kwargs)) is not None:
            self.classes.append(classes)


@replay(SymmetryFacts, when="first", steps=1.0)
def symmetry(session: ReplaySession) -> SymmetryFacts:
    """Finds units with equal weights and equal gradients for any loss. They always stay equal.

    The gradient is that of a randomly weighted sum of the outputs. The gradient of a cross-entropy is no test, because
    it sums to zero behind equal columns.
    """
    alike: dict[str, float] = {}
    with session.live():
        inspector = _Outputs(session)
        inspector.run(upto="forward")
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(t.shape, generator=generator, device="cpu").to(t) for t in inspector.outputs]
        named = [(n, p) for n, p in session.parameters.items() if p.requires_grad and p.dim() >= 2 and p.shape[0] > 1]
        if not named:
            return SymmetryFacts(alike={})
        grads = torch.autograd.grad(inspector.outputs, [p for _, p in named], weights, allow_unused=True)
        for (name, parameter), grad in zip(named, grads):
            if grad is not None and not grad.is_sparse and (fraction := _fraction_equal(parameter.detach(), grad)) > 0:
                alike[name] = fraction
    return SymmetryFacts(alike=alike)


def _fraction_equal(weight: Tensor, grad: Tensor) -> float:
    """Returns the fraction of rows that equal the first one both in the weight and in its gradient."""
    both = []
    for each in (weight, grad):
        rows = each.float().flatten(1)
        size = rows.abs().max()
        if each is grad and not float(size) > 0:
            return 0.0
        both.append(((rows - rows[:1]).abs().amax(1) <= 1e-4 * size) & (each is not grad or rows.abs().amax(1) > 0))
    fraction = (both[0] & both[1])[1:].float().mean()
    return float(fraction)


@replay(FirstLossFacts, when="first", steps=0.5, latest=4)
def first_loss_rescaled(session: ReplaySession) -> FirstLossFacts:
    """Returns the first loss, and the loss with weights of the usual scale."""
    inspector = _Outputs(session)
    with session.live():
        loss = inspector.run(upto="forward").loss
        large = {name: gain for name, gain in _gains(session).items() if gain > LARGE_WEIGHT_RATIO}
    rescaled = math.nan
    if large:
        rescaled = session.run(Intervention(model=lambda: smaller(session, large)), upto="forward").loss
    inputs = [x.float() for x in session.inputs if x.is_floating_point() and x.numel()]
    return FirstLossFacts(
        loss=loss,
        classes=next(iter(inspector.classes), 0),
        input_size=max((float(x.pow(2).mean().sqrt()) for x in inputs), default=0.0),
        large=large,
        rescaled=rescaled,
    )


def _gains(session: ReplaySession) -> dict[str, float]:
    """Returns the standard deviation of each weight matrix times the root of its fan-in, which is usually about 1."""
    names = {id(p): n for n, p in session.parameters.items()}
    gains = {}
    for module in session.modules.values():
        is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for parameter in () if is_table else nn.Module.parameters(module, recurse=False):
            if parameter.dim() >= 2 and id(parameter) in names:
                fan_in = parameter[0].numel()
                gains[names[id(parameter)]] = float(parameter.detach().float().std()) * math.sqrt(fan_in)
    return gains


@contextmanager
def smaller(session: ReplaySession, gains: Mapping[str, float]) -> Iterator[None]:
    """Context in which these weights are divided by their gains. The end of the replay restores them."""
    with torch.no_grad():
        for name, parameter in session.parameters.items():
            if name in gains:
                parameter.data.div_(gains[name])
    yield
