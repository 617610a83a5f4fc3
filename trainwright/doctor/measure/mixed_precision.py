"""Observes 16-bit weights, small gradients and autocast, and measures what a step loses by 16-bit dtypes."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainwright.checkpoint.names import named_parameters
from trainwright.doctor.facts.precision import Aliased, Emptied, FormatFacts, LossInFp32Facts, MixedPrecisionFacts
from trainwright.doctor.measure.tensors import random_state, sampled
from trainwright.recorder.gradients import owned_by
from trainwright.recorder.pausable import without_modes
from trainwright.recorder.plain_tensors import is_plain
from trainwright.recorder.probes import Probe, WatchedObjects, WatchSite
from trainwright.recorder.program import Backward, RecordedStep, mapped, tensors_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.experiments import replay
from trainwright.replay.functions import function_name
from trainwright.replay.mechanism import HALF_DTYPES
from trainwright.replay.modules import ModuleStack
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession

SAMPLED_TENSORS = 8
SAMPLED_ELEMENTS = 256
EVERY_UPDATE_UNTIL = 64  # All updates until this one are sampled, then every INTERVAL_UPDATES-th
INTERVAL_UPDATES = 16
MAX_SAMPLES = 64
MAX_MOVED_FRACTION = 0.05  # A tensor is stuck if at most this fraction of its weights with a gradient has changed
MAX_WINDOWS = 3  # Number of steps with several micro-batches whose gradient sums are compared
MAX_STEPS_OF_SUMS = 16  # Last step whose gradient sums are compared
REPORTED_AT = (2, 6)  # The steps after which the first findings are reported
SMALLEST_FP16 = 2.0**-24  # Smallest positive float16. All float16 numbers are multiples of it.
MOMENTS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"}
    | {"sum", "step", "mu", "eta", "ax", "prev", "step_size"}
)
"""Keys of optimizer state that is neither a float32 copy of the weights nor their rounding error."""


class MixedPrecision(Probe):
    """Samples some elements of some tensors. Costs only a comparison if the loop runs in float32."""

    name = MixedPrecisionFacts.experiment
    only_changes = True

    def __init__(self, watched: WatchedObjects) -> None:
        self._optimizers = watched.subject.optimizers
        parameters = [p for p in watched.subject.parameters if p.numel() and p.is_floating_point()]
        self._device = next((p.device for p in parameters), torch.device("cpu"))
        self._halves = [p for p in parameters if p.dtype in HALF_DTYPES and p.requires_grad][:SAMPLED_TENSORS]
        self._matrices = [p for p in parameters if p.dim() > 1][:SAMPLED_TENSORS]
        self.observes_every_step = bool(self._halves)  # begin and end of one update belong together
        self._is_fp16 = any(p.dtype == torch.float16 for p in self._halves)
        self._steps = 0
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []  # a weight, samples of its values and its gradient
        self._names = {id(p): name for name, p in named_parameters(watched.subject.roots)}
        # a weight, samples of its first values, and whether each of them has had a gradient
        self._first: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._rng = torch.empty(0)
        # (learning rate, fraction of unchanged weights)
        self._still: deque[tuple[float, Tensor]] = deque(maxlen=MAX_SAMPLES)
        self._kept_elsewhere = False
        self._sentinel: Tensor | None = None
        self._stale_since: int | None = None
        self._small: deque[Tensor] = deque(maxlen=MAX_SAMPLES)  # see _smallness
        self._small_now: Tensor | None = None
        self._sums: dict[int, Tensor] = {}
        # samples of the gradients as summed by the loop, and of exact sums
        self._summed: list[tuple[Tensor, Tensor]] = []
        self._micro_batches = 0
        self._windows: list[tuple[int, Tensor, Tensor]] = []
        self._handles: list[RemovableHandle] = []

    @property
    def _is_sampled(self) -> bool:
        return self._steps < EVERY_UPDATE_UNTIL or self._steps % INTERVAL_UPDATES == 0

    # sums over micro-batches

    def begin(self, site: WatchSite) -> None:
        self._handles = [p.register_hook(self._adder(p)) for p in self._halves]  # type: ignore[no-untyped-call]

    def end(self, error: BaseException | None) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _adder(self, parameter: Tensor) -> Callable[[Tensor], None]:
        @without_modes()
        def add(grad: Tensor) -> None:
            if not grad.is_sparse:
                before = self._sums.get(id(parameter))
                if before is None and parameter.grad is not None:
                    before = _sampled(parameter.grad).float()
                self._sums[id(parameter)] = _sampled(grad).float() + (0.0 if before is None else before)

        add.is_recorders = True  # type: ignore[attr-defined]
        return add

    def on_forward(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if torch.is_autocast_enabled(self._device.type):
            self._is_fp16 = torch.get_autocast_dtype(self._device.type) == torch.float16

    def on_gradients(self) -> None:
        self._micro_batches += 1
        if self._handles:
            both = [(p.grad, self._sums.get(id(p))) for p in self._halves]
            self._summed = [(_sampled(g), s) for g, s in both if g is not None and s is not None and not g.is_sparse]
        if self._is_fp16 and self._is_sampled:
            grads = [p.grad for p in self._matrices if p.grad is not None and not p.grad.is_sparse]
            self._small_now = _smallness(grads) if grads else None

    def on_closed(self, step: RecordedStep) -> None:
        if self._small_now is not None:
            scales = [each.scale_at for each in step.program if isinstance(each, Backward)]
            if all(not isinstance(each, Tensor) and each == 1.0 for each in scales):
                self._small.append(self._small_now)
        if self._handles:
            if self._micro_batches > 1 and self._summed:
                sums, exact = (torch.cat([pair[n].float() for pair in self._summed]) for n in (0, 1))
                rounded, norm = exact.to(self._halves[0].dtype).float(), exact.norm().clamp(min=1e-30)
                self._windows.append(
                    (self._micro_batches, (sums - exact).norm() / norm, (rounded - exact).norm() / norm)
                )
            if len(self._windows) >= MAX_WINDOWS or step.step >= MAX_STEPS_OF_SUMS:
                self.end(None)
        self._small_now, self._sums, self._summed, self._micro_batches = None, {}, [], 0
        self._steps = step.step
        if step.step in REPORTED_AT and (self._halves or self._is_fp16 or self._sentinel is not None):
            self.urgent = True

    # updates

    def on_step(self, optimizer: Optimizer, args: Args) -> None:
        if not self._is_sampled or optimizer not in self._optimizers:
            return
        self._test_autocast_cache()
        if self._halves:
            owned = {id(p) for p in owned_by(optimizer)}
            both = [(p, p.grad) for p in self._halves if id(p) in owned]
            self._before = [(p, _sampled(p), _sampled(g)) for p, g in both if g is not None and not g.is_sparse]
            self._rng = random_state(self._device)
            for p, weight, grad in self._before:
                first = self._first.get(id(p), (p, weight, torch.zeros_like(grad, dtype=torch.bool)))
                self._first[id(p)] = (*first[:2], first[2] | (grad != 0))

    def on_stepped(self, optimizer: Optimizer) -> None:
        before, self._before = self._before, []
        if not before:
            return
        has_grad = torch.cat([grad != 0 for _, _, grad in before])
        same = torch.cat([weight == _sampled(p) for p, weight, _ in before])
        self._kept_elsewhere |= not torch.equal(self._rng, random_state(self._device))  # stochastic rounding
        self._kept_elsewhere |= any(_keeps_copies(optimizer, p) for p, _, _ in before)
        still = (same & has_grad).sum() / has_grad.sum().clamp(min=1)
        self._still.append((float(optimizer.param_groups[0].get("lr", 0.0)), still))

    def _test_autocast_cache(self) -> None:
        """Casts a test weight within autocast and changes it. A stale autocast cache still returns the old value."""
        kind = self._device.type
        if not torch.is_autocast_enabled(kind) or not torch.is_autocast_cache_enabled():
            self._sentinel = None
            return
        sentinel = self._sentinel
        if sentinel is not None and self._stale_since is None and float(_cast(sentinel)) != float(sentinel.detach()):
            self._stale_since = self._steps + 1
        self._sentinel = torch.ones(1, 1, device=self._device, requires_grad=True)
        _cast(self._sentinel)
        self._sentinel.data.fill_(2.0)

    def facts(self) -> MixedPrecisionFacts:
        highest = max((lr for lr, _ in self._still), default=0.0)
        at_full_rate = [float(still) for lr, still in self._still if lr >= 0.5 * highest > 0]
        small = torch.stack([*self._small]).median(0).values.tolist() if len(self._small) > 1 else [0.0, math.inf]
        worst = max(self._windows, key=lambda each: float(each[1]), default=(0, 0.0, 0.0))
        self.urgent = False
        return MixedPrecisionFacts(
            still=statistics.median(at_full_rate) if at_full_rate else 0.0,
            updates=len(at_full_rate),
            is_constant_rate=len({lr for lr, _ in self._still}) == 1,
            kept_elsewhere=self._kept_elsewhere,
            never_moved=tuple(self._names.get(key, "") for key, each in self._first.items() if _is_stuck(*each)),
            stale_since=self._stale_since,
            zeros=small[0],
            rms_in_steps=small[1],
            micro_batches=worst[0],
            sum_error=float(worst[1]),
            sum_rounding=float(worst[2]),
        )


def _sampled(tensor: Tensor) -> Tensor:
    return sampled(tensor, SAMPLED_ELEMENTS)


def _is_stuck(weight: Tensor, first: Tensor, has_gradient: Tensor) -> bool:
    """Returns True if hardly any weight that had a gradient differs from its first value."""
    moved = (first != _sampled(weight)) & has_gradient
    return bool(has_gradient.any() & (moved.sum() <= MAX_MOVED_FRACTION * has_gradient.sum()))


def _smallness(grads: Sequence[Tensor]) -> Tensor:
    """Returns the fraction of zeros in float16 gradients, and their root mean square in units of SMALLEST_FP16.

    Gradients count as float16 if all values are multiples of SMALLEST_FP16. Without any, the result is (0, inf).
    """
    in_steps = [_sampled(grad).float().abs() / SMALLEST_FP16 for grad in grads]
    is_fp16 = torch.stack([(each == each.round()).all() for each in in_steps]).float()
    zeros = torch.stack([(each == 0).float().mean() for each in in_steps])
    squares = torch.stack([each.square().mean() for each in in_steps])
    number = is_fp16.sum()
    return torch.stack(
        [zeros @ is_fp16 / number.clamp(min=1), (squares @ is_fp16 / number).sqrt().nan_to_num(torch.inf)]
    )


def _keeps_copies(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Returns True if the optimizer keeps state in the shape of a parameter that may be master weights."""
    state: Kwargs = optimizer.state.get(parameter, {})
    return not type(optimizer).__module__.startswith("trainwright.") and any(
        isinstance(value, Tensor) and value.shape == parameter.shape and parameter.dim() > 0 and key not in MOMENTS
        for key, value in state.items()
    )


def _cast(sentinel: Tensor) -> Tensor:
    with torch.enable_grad():
        return torch.mm(sentinel, torch.ones_like(sentinel, requires_grad=False)).detach()


CASTS = frozenset({"half", "bfloat16", "to", "type", "type_as"})
MAX_MICRO_BATCHES = 4  # Maximum number of micro-batches of a step that are compared
EXACT_POSITIONS = 256  # bfloat16 represents all integers up to this one
MIN_HALF_POSITIONS = 8  # Tables of 16-bit angles with more positions than this are examined
MAX_ANGLES = 2**24
Grads = Mapping[str, Tensor | None]


@replay(FormatFacts, when="first", steps=0.5, value=1.5)
def formats(session: ReplaySession) -> FormatFacts:
    """Returns the 16-bit dtype of a step, the loss functions that take it, results that underflow, and equal angles."""
    modules = ModuleStack(session.modules)
    dtypes: set[torch.dtype] = set()
    loss_ops: dict[str, None] = {}
    emptied: list[Emptied] = []
    aliased = [
        found for path, module in session.modules.items() if (found := _aliased_tables(module, path)) is not None
    ]

    def observe(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        result = function(*args, **kwargs)
        name, results = function_name(function), [result] if isinstance(result, Tensor) else tensors_of(result)
        dtypes.update(each.dtype for each in results)
        if modules.innermost is None and results and any(t.dtype in HALF_DTYPES for t in tensors_of(args)):
            loss_ops[name] = None
        if name in ("sin", "cos") and (found := _aliased(args[0], modules.innermost or "")) is not None:
            aliased.append(found)
        if isinstance(result, Tensor) and result.dtype == torch.float16 and not result.any() and is_plain(result):
            exact = in_fp32(function, args, kwargs)
            if isinstance(exact, Tensor) and bool((exact != 0).any()):
                emptied.append(Emptied(name, modules.innermost, float(exact.detach().abs().max())))
        return result

    session.run(Intervention(ops=observe, model=modules.following), upto="forward")
    return FormatFacts(
        dtype=min((str(each).removeprefix("torch.") for each in dtypes.intersection(HALF_DTYPES)), default=""),
        loss_ops=tuple(loss_ops)[:8],
        emptied=tuple(emptied[:4]),
        aliased=tuple(aliased[:4]),
    )


def has_half_parameters(session: ReplaySession) -> bool:
    """Returns True if a parameter has a 16-bit dtype."""
    return any(p.dtype in HALF_DTYPES for p in session.replayer.subject.parameters)


def _aliased(angles: object, module: str) -> Aliased | None:
    """Returns facts if at least a tenth of the positions far from 0 have their neighbour's angles; else None."""
    if not isinstance(angles, Tensor) or not angles.is_floating_point() or angles.requires_grad:
        return None
    fewest = MIN_HALF_POSITIONS if angles.dtype in HALF_DTYPES else EXACT_POSITIONS
    if not fewest < angles.numel() <= MAX_ANGLES:
        return None
    rows = angles.detach().float()
    rows = rows[:, None] if rows.dim() == 1 else rows.flatten(0, -2)
    for table in (rows, rows.T):
        places = table.abs().amax(1)
        is_order = len(table) > EXACT_POSITIONS or bool((places.diff() >= 0).all() & (places[0] < places[-1]))
        far = places >= EXACT_POSITIONS
        if len(table) > fewest and is_order and bool(far.any()):
            return _with_equal_neighbours(table, far, module, angles.dtype)
    return None


def _aliased_tables(module: nn.Module, path: str) -> Aliased | None:
    """Returns the facts of ``_aliased`` for tables of cosines and sines that a module holds, one row per position."""
    held = [t for t in (*module._buffers.values(), *vars(module).values()) if isinstance(t, Tensor) and t.dim() == 2]
    for cosines, sines in pairwise(held):
        if cosines.shape == sines.shape and len(sines) > EXACT_POSITIONS and sines.dtype in HALF_DTYPES:
            a, b = cosines.detach().float(), sines.detach().float()
            if float((a.square() + b.square() - 1).abs().max()) < 0.05:
                far = torch.arange(len(a), device=a.device) >= EXACT_POSITIONS
                return _with_equal_neighbours(torch.cat([a, b], 1), far, path, sines.dtype)
    return None


def _with_equal_neighbours(table: Tensor, far: Tensor, module: str, dtype: torch.dtype) -> Aliased | None:
    same, number = int(((table[1:] == table[:-1]).all(1) & far[1:]).sum()), int(far.sum())
    return Aliased(module, str(dtype).removeprefix("torch."), number, same) if 10 * same >= number else None


def in_fp32(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
    """Calls a torch function with its arguments in float32."""
    device = next((t.device.type for t in tensors_of(args)), "cpu")
    with torch.autocast(device, enabled=False):
        if function_name(function) in CASTS:
            result = function(*args, **kwargs)
            is_cast = isinstance(result, Tensor) and result.dtype in HALF_DTYPES and args[0].is_floating_point()
            return args[0].float() if is_cast else result
        if "dtype" in kwargs:
            kwargs = {k: torch.float32 if v in HALF_DTYPES else v for k, v in kwargs.items()}
        return function(*mapped(args, _widen), **mapped(kwargs, _widen))


def _widen(value: object) -> object:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF_DTYPES else value


@replay(LossInFp32Facts, when="requested", steps=2.6)
def loss_in_fp32(session: ReplaySession) -> LossInFp32Facts:
    """Returns the difference of the gradients if the loss is computed in float32 from the same outputs."""
    modules = ModuleStack(session.modules)
    micro = range(MAX_MICRO_BATCHES) if len(session.recorded_step.losses) > MAX_MICRO_BATCHES else None

    def widened(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        return function(*args, **kwargs) if modules.innermost is not None else in_fp32(function, args, kwargs)

    plain = session.run(Intervention(micro=micro))
    exact = session.run(Intervention(ops=widened, model=modules.following, micro=micro))
    if exact.error is not None:
        raise exact.error
    return LossInFp32Facts(loss=plain.loss, loss_in_fp32=exact.loss, error=gradient_distance(plain.grads, exact.grads))


def gradient_distance(grads: Grads, exact: Grads) -> float | None:
    """Returns the relative error of all gradients together; None if one is not finite or there are none."""
    error = norm = 0.0  # sums of squares
    for name, true in exact.items():
        grad = grads.get(name)
        if true is not None and grad is not None and not true.is_sparse:
            error += float((grad.double() - true.double()).square().sum())
            norm += float(true.double().square().sum())
    return (error / norm) ** 0.5 if norm > 0 and math.isfinite(error) and math.isfinite(norm) else None
