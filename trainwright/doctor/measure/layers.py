"""Examines layers in the live loop: dead activations, gradients by depth, masks, routers, BatchNorm."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from trainwright.doctor.facts.layers import (
    DropoutFacts,
    LayerGradient,
    LayersFacts,
    NormFacts,
    ReluFacts,
    RouterFacts,
    WrongAxes,
)
from trainwright.doctor.measure.loop_signs import UniformNoise
from trainwright.doctor.measure.modules import ModuleProbe
from trainwright.doctor.measure.tensors import is_reordered, padding_of
from trainwright.recorder.callers import caller
from trainwright.recorder.listener import inside
from trainwright.recorder.pausable import PausableMode
from trainwright.recorder.plain_tensors import is_plain, plain
from trainwright.recorder.probes import WatchedObjects
from trainwright.recorder.program import RecordedStep, tensors_of
from trainwright.recorder.tensor_notes import TensorNotes
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.experiments import replay
from trainwright.replay.functions import argument, function_name
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession
from trainwright.runs.json_values import Facts, strict

MAX_MASKED_SCORE = -1e4  # Scores below this value are masked, also in float16
MIN_PASSES = 2  # Minimum number of passes that show a mistake
MAX_SITES = 16
TABLES = (nn.Embedding, nn.EmbeddingBag)


class Axes:
    """Finds wrong axes, masks and noise in training passes. ``begin`` is called before each pass with its inputs."""

    def __init__(self) -> None:
        self._found: Counter[tuple[str, str, str | None, tuple[tuple[int, ...], ...]]] = Counter()
        self._padding: Tensor | None = None
        self.noise = UniformNoise()

    def begin(self, args: Args, kwargs: Kwargs) -> None:
        inputs = [each for each in plain(tensors_of((args, kwargs), 3)) if not each.is_floating_point()]
        found = next((found for each in inputs if (found := padding_of(each)) is not None), None)
        self._padding = None if found is None or found[1].all(1).any() else found[1]
        self.noise.forget()

    def note(self, path: str, name: str, args: Args, kwargs: Kwargs, result: object) -> None:
        if self.noise.note(name, args, result):
            self._add("uniform_noise", path)
        if name in ("view", "reshape") and isinstance(result, Tensor) and is_reordered(args[0].shape, result.shape):
            self._add("reordered", path, tuple(args[0].shape), tuple(result.shape))
        if name == "softmax" and isinstance(result, Tensor) and result.dim() > 2:
            axis = argument(args, kwargs, 1, "dim", None)
            if axis in (0, -result.dim()) or (axis is None and result.dim() == 3):  # the default of three axes is 0
                self._add("softmax_over_batch", path, tuple(result.shape))
        if self._padding is not None and (hidden := hidden_keys(name, args, kwargs)) is not None:
            rows = self._padding.any(1)
            if hidden.shape == self._padding.shape and torch.equal(hidden[rows], ~self._padding[rows]):
                self._add("inverted", path, tuple(hidden.shape))

    def _add(self, kind: str, path: str, *shapes: tuple[int, ...]) -> None:
        key = (kind, path, caller(), shapes)
        if key in self._found or len(self._found) < MAX_SITES:
            self._found[key] += 1

    def facts(self) -> tuple[WrongAxes, ...]:
        return tuple(
            WrongAxes(kind=kind, module=path, line=line, shapes=shapes)
            for (kind, path, line, shapes), times in self._found.items()
            if times >= MIN_PASSES
        )


def hidden_keys(name: str, args: Args, kwargs: Kwargs) -> Tensor | None:
    """Returns the keys that attention hides from all queries of a row, of shape (batch, keys)."""
    if name == "multi_head_attention_forward":
        mask, is_shown = kwargs.get("key_padding_mask"), False
    elif name == "scaled_dot_product_attention":
        mask, is_shown = argument(args, kwargs, 3, "attn_mask", None), True
    elif name == "softmax" and isinstance(args[0], Tensor) and args[0].dim() > 2:
        mask, is_shown = args[0].detach(), False
    else:
        return None
    if not isinstance(mask, Tensor) or mask.dim() < 2:
        return None
    hidden = (~mask if is_shown else mask) if mask.dtype == torch.bool else mask <= MAX_MASKED_SCORE
    return hidden.flatten(1, -2).all(1) if hidden.dim() > 2 else hidden


RELUS = {"relu", "relu_", "threshold", "threshold_", "relu6"}
MAPS = {"linear", "conv1d", "conv2d", "conv3d"}
DROPOUTS = frozenset({"dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"})
DROPOUTS |= {"dropout_", "dropout1d", "dropout2d", "dropout3d"}
_CHOICES = {"topk", "max", "argmax", "argsort", "sort", "multinomial"}
_MEASURED = frozenset({*RELUS, *MAPS, *DROPOUTS, *_CHOICES, "softmax", "view", "reshape"})
_MEASURED |= {"multi_head_attention_forward", "scaled_dot_product_attention", "rand", "rand_like"}
STRONG_DROPOUT = 0.7  # Dropout rates from this value on are suspicious


class _Functions(PausableMode):
    """Calls ``listener`` with every measured torch function of an examined training pass.

    ``observes_all``: calls it with all functions, because the model has drawn uniform noise.
    """

    def __init__(self, listener: Callable[[str, Args, Kwargs, object], None]) -> None:
        super().__init__()
        self._listener, self.observes_all = listener, False

    def __torch_function__(
        self, function: TorchFunction, types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        result = function(*args, **(kwargs or {}))
        if not self.running or ((name := function_name(function)) not in _MEASURED and not self.observes_all):
            return result
        if not inside.listeners and not torch.compiler.is_compiling():
            self.running = False  # operations of the listener are not the model's
            try:
                self._listener(name, args, kwargs or {}, result)
            finally:
                self.running = True
        return result


class LayerMeasurement(ModuleProbe):
    """Collects measurements of each layer in one training pass."""

    name = LayersFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        super().__init__(watched)
        self._functions = _Functions(self.guarded(self._record_function))
        self._norms = {path: m for path, m in self.modules.items() if isinstance(m, _BatchNorm)}
        self._facts: LayersFacts | None = None
        self._axes = Axes()
        self._clear()

    def _clear(self) -> None:
        self._relus: dict[str, ReluFacts] = {}
        self._routers: dict[str, RouterFacts] = {}
        self._seen: dict[str, NormFacts] = {}
        self._dropout: dict[str, float] = {}
        self._inactive: dict[str, str | None] = {}
        self._depth: tuple[LayerGradient, ...] = ()
        self._order: dict[str, None] = {}
        self._updates: dict[str, int] = {}
        self._is_fp16 = False
        self._drop_pass()

    def _drop_pass(self) -> None:
        self._gates: TensorNotes[None] = TensorNotes()  # results of softmax, which may be gates of a router
        # for outputs of linear maps: a function that returns the expected standard deviation of each unit
        self._expected: TensorNotes[Callable[[], Tensor | None]] = TensorNotes()

    def on_forward(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        super().on_forward(root, args, kwargs)
        if self.is_hooked:
            device = next((p.device.type for p in root.parameters()), "cpu")
            self._is_fp16 |= torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
            self._updates = self._updates or _updates(self._norms)
            if "" not in self.stack:
                self.stack.append("")
            self._order.setdefault("")
            self._axes.begin(args, kwargs)
            self._functions.observes_all = False
            self._functions.start()

    def on_output(self, root: nn.Module, output: object) -> None:
        if self._functions.pushed:
            self._functions.stop()
            self._drop_pass()
        super().on_output(root, output)

    def entered(self, path: str, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        self._order.setdefault(path)
        if not isinstance(module, _BatchNorm) or not module.training or not (inputs := tensors_of((args, kwargs), 2)):
            return
        x, known = inputs[0], self._seen.get(path, NormFacts())
        self._seen[path] = NormFacts(
            values=x.numel() // max(1, x.shape[1]),
            samples=int(x.shape[0]),
            calls=known.calls + 1,
            momentum=module.momentum or 0.0,
        )

    def on_step(self, optimizer: Optimizer, args: Args) -> None:
        if not self.is_examining or self._depth:
            return
        sizes = []
        for path in self._order:
            module = self.modules.get(path)  # None: the root of several models
            for p in (
                () if module is None or isinstance(module, TABLES) else nn.Module.parameters(module, recurse=False)
            ):
                if p.dim() >= 2 and p.grad is not None and not p.grad.is_sparse:
                    grad = torch.view_as_real(p.grad) if p.is_complex() else p.grad
                    norm = torch.linalg.vector_norm(grad.detach(), dtype=torch.float64)
                    sizes.append((path, norm / math.sqrt(p.numel())))
                    break
        self._depth = tuple(LayerGradient(module=path, size=float(size)) for path, size in sizes)

    def ended(self, step: RecordedStep) -> None:
        self._functions.stop()
        after = _updates(self._norms)
        norms = {
            path: replace(each, updates=after.get(path, 0) - self._updates.get(path, 0))
            for path, each in self._seen.items()
        }
        self._facts = LayersFacts(
            relus=self._relus,
            routers=self._routers,
            norms=norms,
            depth=self._depth,
            is_fp16=self._is_fp16 or any(p.dtype == torch.float16 for p in self.watched.subject.parameters),
            dropout=self._dropout,
            inactive_dropout=self._inactive,
            axes=self._axes.facts(),
        )
        self._clear()

    def values(self) -> Facts | None:
        facts, self._facts = self._facts, None
        return None if facts is None else {**strict(asdict(facts)), "step": self.step}

    def end(self, error: BaseException | None) -> None:
        self._functions.stop()
        super().end(error)

    def fail(self, error: Exception) -> None:
        self._functions.stop()
        super().fail(error)

    @torch.no_grad()
    def _record_function(self, name: str, args: Args, kwargs: Kwargs, result: object) -> None:
        if not self.stack or not all(map(is_plain, tensors_of((args, kwargs, result), 3))):
            return
        self._axes.note(self.stack[-1], name, args, kwargs, result)
        self._functions.observes_all = self._axes.noise.is_drawn
        if name in MAPS and len(tensors := tensors_of([args, kwargs], 3)) > 1:
            for made in tensors_of(result, 1):
                self._expected[made] = _expected_spread(tensors[0], tensors[1], made)
        if name in RELUS and args[0].is_floating_point() and not name.endswith("_"):
            self._record_relu(args[0])
        elif name in DROPOUTS:
            self._record_dropout(args, kwargs)
        elif name == "softmax" and args[0].dim() >= 2 and isinstance(result, Tensor):
            self._gates[result] = None
        if name in _CHOICES and args and isinstance(args[0], Tensor):
            self._record_choice(name, args[0], result)

    def _record_relu(self, x: Tensor) -> None:
        """Finds dead units: no sample will make their input positive.

        The mean input of a dead unit is far below 0, in units of the larger of two standard deviations: the measured
        one, and the one expected from the weights and the size of the layer's input. The second is needed because in a
        deep plain network, the inputs of a unit hardly differ between samples. This alone does not make a unit dead.
        """
        units = x.detach().float()
        units = units.movedim(1, -1) if units.dim() in (4, 5) else units
        units = units.flatten(0, -2) if units.dim() > 1 else units[:, None]
        if len(units) < 8:
            return
        is_off = units.amax(0) < 0
        if not is_off.any():
            return
        mean, spread = units.mean(0), units.std(0)
        varies = spread > 1e-5 * mean.abs()
        expected = None if (note := self._expected.get(x)) is None else note()
        if expected is not None and len(expected) == len(spread):
            spread = torch.maximum(spread, expected.float())
        dead = is_off & (mean < -4 * spread) & varies
        facts = ReluFacts(
            dead=float(dead.float().mean()),
            varies=float(varies.float().mean()),
            rows=len(units),
            furthest=float(mean.min()),
        )
        known = self._relus.get(self.stack[-1])
        if known is None or facts.dead > known.dead:
            self._relus[self.stack[-1]] = facts

    def _record_dropout(self, args: Args, kwargs: Kwargs) -> None:
        p, is_on, path = (
            argument(args, kwargs, 1, "p", 0.5),
            argument(args, kwargs, 2, "training", True),
            self.stack[-1],
        )
        if is_on and isinstance(p, float) and p >= STRONG_DROPOUT:
            self._dropout[path] = max(p, self._dropout.get(path, 0.0))
        elif not is_on and p and path in self.modules and self.modules[path].training:
            self._inactive[path] = caller()

    # routers: a softmax whose largest values choose experts and weight their outputs

    def _record_choice(self, name: str, gates: Tensor, result: object) -> None:
        indices = [t for t in tensors_of(result, 2) if not t.is_floating_point()]
        if not indices or gates.dim() < 2 or not 2 <= gates.shape[-1] <= 512 or gates.numel() < 8 * gates.shape[-1]:
            return
        num = int(gates.shape[-1])
        if gates not in self._gates and not self._has_experts(num):
            return
        chosen = indices[0]
        chosen = chosen if name not in {"argsort", "sort"} else chosen[..., :1]
        if int(chosen.max()) >= num:
            return
        load = torch.bincount(chosen.flatten(), minlength=num).float() / chosen.numel()
        entropy = float(-(load * load.clamp(min=1e-30).log()).sum())
        path = self.stack[-1]
        self._routers.pop(path, None)  # the last choice counts
        if self._has_experts(num) or any(t.is_floating_point() and t.requires_grad for t in tensors_of(result, 2)):
            self._routers[path] = RouterFacts(experts=num, effective=math.exp(entropy), most=float(load.max()))

    def _has_experts(self, num: int) -> bool:
        """Returns True if a running module holds a list of ``num`` modules of one class."""
        inside = [self.modules[path] for path in self.stack if path in self.modules]
        return any(
            isinstance(child, nn.ModuleList) and len(child) == num and len({type(m) for m in child}) == 1
            for module in inside
            for child in module.children()
        )


def _expected_spread(x: Tensor, weight: Tensor, made: Tensor) -> Callable[[], Tensor | None]:
    """Returns a function that returns the standard deviation of each unit of ``made`` that weight and input size give.

    Few outputs are inputs of a ReLU, so it is computed on demand if autograd keeps ``x`` until then, else at once.
    """
    known = weakref.ref(x)

    def spread() -> Tensor | None:
        given = known()
        return None if given is None else weight.flatten(1).norm(dim=1) * given.pow(2).mean().sqrt()

    if made.requires_grad and weight.requires_grad and made.dtype == x.dtype:
        return spread
    now = spread()
    return lambda: now


def _updates(norms: dict[str, _BatchNorm]) -> dict[str, int]:
    """Returns the number of updates of the running statistics of each BatchNorm."""
    return {path: int(m.num_batches_tracked) for path, m in norms.items() if m.num_batches_tracked is not None}


def _without_dropout(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
    """Calls a function, except for strong dropout, whose input is returned."""
    p = argument(args, kwargs, 1, "p", 0.5) if function_name(function) in DROPOUTS else 0.0
    return args[0] if isinstance(p, float) and p >= STRONG_DROPOUT else function(*args, **kwargs)


@replay(DropoutFacts, when="requested", steps=4.0)
def dropout_gap(session: ReplaySession) -> DropoutFacts:
    """Returns the loss of the step's batch without strong dropout, and its mean over eight dropout masks."""
    losses = []
    with session.live():
        for seed in range(8):
            torch.manual_seed(seed)
            change = Intervention(fresh_rng=True)
            losses.append(session.replayer.run(session.recorded_step, change, upto="forward").loss)
    without = session.run(Intervention(ops=_without_dropout), upto="forward").loss
    return DropoutFacts(with_dropout=sum(losses) / len(losses), without=without)
