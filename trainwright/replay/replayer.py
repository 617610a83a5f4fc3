"""Replays a recorded step on the live objects, bit for bit or with one change, and restores them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from trainwright.checkpoint.isolation import NotIsolated
from trainwright.checkpoint.reach import ReachableState
from trainwright.checkpoint.snapshot import LiveObjects, Snapshot, copied
from trainwright.engine.recover import is_out_of_memory
from trainwright.optim.clip import make_clip
from trainwright.recorder.graph import leaves_of
from trainwright.recorder.program import (
    Autocast,
    Backward,
    Call,
    ClipGradients,
    Constant,
    Instruction,
    Multiply,
    Operation,
    OptimizerStep,
    RecordedStep,
    Slot,
    ZeroGrad,
    constants_of,
    mapped,
    others_of,
    tensors_of,
)
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.deadline import Deadline
from trainwright.replay.dtypes import DTYPES, cast_to
from trainwright.replay.functions import InputHandler, OpHandler
from trainwright.replay.stage import NotReplayable as NotReplayable
from trainwright.replay.stage import staged

Upto: TypeAlias = Literal["forward", "backward", "step"]
ParamGroup: TypeAlias = dict[str, Any]
"""A parameter group of an optimizer, or hyperparameters to set in it."""


@dataclass(frozen=True)
class Intervention:
    """Changes of a replay. By default nothing changes, and the result has the same bits.

    Attributes:
        inputs: Called with the index of a forward call and its arguments; returns the arguments to use.
        constants: Changes tensors in the loss that the step did not make, such as targets.
        ops: Called instead of every torch function.
        rows: Indices of the samples to use.
        micro: Indices of the micro-batches to run, in this order.
        loss_scale: Factor of the loss before its backward pass.
        dtype: Dtype of weights and inputs. Autocast is then off.
        mode: Mode of all modules.
        lr: Factor of the learning rate.
        group: Called with the number of the step and a parameter group; returns hyperparameters to set in the group.
        clip: Threshold of every clip by norm, by value or "agc".
        model: Makes a context manager that is entered around the step.
        fresh_rng: Draws new random numbers instead of the recorded ones.
    """

    inputs: InputHandler | None = None
    constants: Callable[[Tensor], Tensor] | None = None
    ops: OpHandler | None = None
    rows: Sequence[int] | None = None
    micro: Sequence[int] | None = None
    loss_scale: float = 1.0
    dtype: Literal["fp32", "fp64"] | None = None
    mode: Literal["train", "eval"] | None = None
    lr: float = 1.0
    group: Callable[[int, ParamGroup], ParamGroup] | None = None
    clip: float | None = None
    model: Callable[[], AbstractContextManager[object]] | None = None
    fresh_rng: bool = False


UNCHANGED = Intervention()


@dataclass
class ReplayResult:
    """The result of a replay. Tensors are copies. ``losses`` are the unscaled tensors on which backward() was called.

    ``before`` and ``after`` are the weights before and after the update. ``norm_at_clip`` is the gradient norm before
    the last clip; None without a clip that measures it. ``error`` is the error of the user's code.
    """

    losses: list[Tensor] = field(default_factory=list)
    outputs: list[object] = field(default_factory=list)
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    grad_norm: float = 0.0
    norm_at_clip: float | None = None
    error: Exception | None = None

    @property
    def loss(self) -> float:
        """The mean of the losses."""
        return float(torch.stack([each.double().cpu() for each in self.losses]).mean()) if self.losses else float("nan")


class Replayer:
    """Replays recorded steps on live objects and restores them. ``names`` are the names of their parameters."""

    def __init__(self, subject: LiveObjects, names: Sequence[str]) -> None:
        self.subject, self.names, self.deadline = subject, list(names), Deadline()
        self._now: ReachableState | None = None
        self._then: ReachableState | None = None
        self.known = frozenset(id(p) for p in subject.parameters)
        self.device = subject.parameters[0].device if subject.parameters else torch.device("cpu")

    @contextmanager
    def stage(self, snapshot: Snapshot) -> Iterator[None]:
        """Context in which the live objects have the state of ``snapshot``. They are restored afterwards."""
        before = self._now, self._then
        with self._outside_autocast(), staged(self.subject, snapshot) as now:
            self._now, self._then = now, snapshot.reach
            try:
                yield
            finally:
                self._now, self._then = before

    def _outside_autocast(self) -> AbstractContextManager[object]:
        """Context outside of the loop's autocast, so that the replay neither reads nor fills its weight cache."""
        device = self.device.type
        if not torch.is_autocast_enabled(device):
            return nullcontext()
        return torch.autocast(device, enabled=False, cache_enabled=False)

    def run(
        self, recorded: RecordedStep, intervention: Intervention = UNCHANGED, *, upto: Upto = "step"
    ) -> ReplayResult:
        """Replays one step, within ``stage``. Errors of the user's code are returned as ``error``."""
        self._keep_others(recorded)
        return _Run(self, recorded, intervention, upto).run()

    def _keep_others(self, recorded: RecordedStep) -> None:
        """Captures the state of objects that the step uses besides the models: their arguments, functions of the loss.

        Raises:
            NotReplayable: The state of one of them is unknown.
        """
        assert self._now is not None, "run within ``stage``"
        for call in recorded.calls:
            if call.held is not None:
                self._now.include(call.held.roots)
                if call.held.gaps:
                    raise NotIsolated(call.held.gaps[0])
        others = others_of(recorded.program)
        if others:
            self._now.include(others)
            if self._now.gaps:
                raise NotIsolated(self._now.gaps[0])
            if self._then is not None and not self._then.knows(ReachableState(others, self.subject.modules)):
                raise NotReplayable(f"{others[0][0]} has state that was not kept before this step")


@dataclass
class _Run:
    """One replay of one step. ``slots`` holds the tensors that the program made, by number."""

    replayer: Replayer
    recorded: RecordedStep
    intervention: Intervention
    upto: Upto
    slots: dict[int, Tensor] = field(default_factory=dict)
    result: ReplayResult = field(default_factory=ReplayResult)
    calls: int = 0
    around: ExitStack = field(default_factory=ExitStack)

    def run(self) -> ReplayResult:
        recorded, parameters = self.recorded, self.replayer.subject.parameters
        carried = recorded.values.get("carried")
        for parameter, grad in zip(parameters, carried or []):
            parameter.grad = None if grad is None else grad.clone()
        with self.around as around:
            if self.intervention.model is not None:
                around.enter_context(self.intervention.model())
            if self.intervention.dtype is not None:
                around.enter_context(cast_to(self.replayer.subject, self.intervention.dtype))
            try:
                for each in _select(recorded.program, self.intervention.micro):
                    self._do(each)
            except NotReplayable:
                raise
            except Exception as error:
                # the replay needs more memory than the loop, so this is no evidence about the step
                if is_out_of_memory(error):
                    raise
                self.result.error = error
            if self.upto == "backward":
                self._read_grads()
            elif self.upto == "step" and not self.result.after:  # a scaler skipped the update
                self._read_grads()
                self.result.before = self.result.after = _weights(self.replayer)
        return self.result

    def _do(self, each: Instruction) -> None:
        self.replayer.deadline.check()
        match each:
            case Call():
                self._call(each)
            case Operation():
                self._operation(each)
            case Backward():
                self._backward(each)
            case _ if self.upto == "forward":
                return
            case ZeroGrad():
                self._zero(each)
            case Multiply() | ClipGradients() | OptimizerStep() if self.upto == "step":
                self._update(each)

    def _call(self, call: Call) -> None:
        root = self.replayer.subject.roots[call.root].get_submodule(call.part)
        args, kwargs = self._read(call.args), self._read(call.kwargs)
        if call.held is not None and (lost := call.held.put_back()):
            raise NotReplayable(f"{lost[0]} was written to after it was used")
        if self.intervention.inputs is not None:
            args, kwargs = self.intervention.inputs(self.calls, args, kwargs)
        self.calls += 1
        if not self.intervention.fresh_rng:
            torch.set_rng_state(call.rng[0])
            if call.rng[1] is not None:
                torch.cuda.set_rng_state(call.rng[1], self.replayer.device)
        for module, training in zip(self.replayer.subject.modules, call.training):
            module.training = training if self.intervention.mode is None else self.intervention.mode == "train"
        for parameter, wanted in zip(self.replayer.subject.parameters, call.wanted):
            if parameter.requires_grad != wanted:
                parameter.requires_grad_(wanted)
        with self._autocast(call.autocast), self._ops():
            output = root(*args, **kwargs)
        self.slots.update(zip(call.outputs, tensors_of(output)))
        self.result.outputs.append(mapped(output, lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf))

    def _operation(self, operation: Operation) -> None:
        args, kwargs = self._read(operation.args, True), self._read(operation.kwargs, True)
        with self._autocast(operation.autocast), self._ops(), torch.set_grad_enabled(operation.with_grad):
            result = operation.function(*args, **kwargs)
        made = [result] if isinstance(result, Tensor) else [r for r in result if isinstance(r, Tensor)]
        self.slots.update(zip(operation.outputs, made))

    def _backward(self, backward: Backward) -> None:
        if backward.slot is None or backward.slot not in self.slots:
            raise NotReplayable("the loss does not depend on the output of the watched model")
        loss = self.slots[backward.slot]
        if loss.numel() == 1:
            value = loss.detach() / backward.scale if backward.scale != 1.0 else loss.detach()
            self.result.losses.append(value.clone())
        if self.upto == "forward" or not loss.requires_grad:
            return
        factor = self.intervention.loss_scale
        gradient = self._read(backward.gradient)
        inputs = None if backward.inputs is None else self._read(backward.inputs)
        for leaf in leaves_of([loss]):
            if id(leaf) not in self.replayer.known:  # an input, or a parameter that no optimizer holds
                self.around.callback(setattr, leaf, "grad", leaf.grad)
                leaf.grad = None
        loss = loss * factor if factor != 1.0 else loss
        torch.autograd.backward(loss, gradient, retain_graph=backward.retain, inputs=inputs)

    def _zero(self, zero: ZeroGrad) -> None:
        subject = self.replayer.subject
        optimizers = subject.optimizers if zero.optimizer is None else [subject.optimizers[zero.optimizer]]
        for optimizer in optimizers:
            optimizer.zero_grad()
        if zero.optimizer is None:
            for parameter in subject.parameters:
                parameter.grad = None

    @torch.no_grad()
    def _update(self, each: Multiply | ClipGradients | OptimizerStep) -> None:
        parameters = self.replayer.subject.parameters
        if isinstance(each, OptimizerStep):
            self._step(each)
            return
        chosen = [parameters[n] for n in (each.parameters if each.parameters is not None else range(len(parameters)))]
        grads = [p.grad for p in chosen if p.grad is not None]
        if isinstance(each, ClipGradients):
            self._clip(each, chosen)
        elif grads and each.factor is not None:
            torch._foreach_mul_(grads, each.factor)

    def _clip(self, clip: ClipGradients, parameters: Sequence[Tensor]) -> None:
        at = clip.at if self.intervention.clip is None else self.intervention.clip
        if clip.by == "norm":
            self.result.norm_at_clip = float(clip_grad_norm_(parameters, at))
        elif clip.by == "value":
            clip_grad_value_(parameters, at)
        elif (function := make_clip("agc", at) if clip.by == "agc" else clip.function) is not None:
            with_grad = [p for p in parameters if p.grad is not None]
            norm = get_total_norm([p.grad for p in with_grad if p.grad is not None])
            self.result.norm_at_clip = float(norm)
            function(with_grad, norm)
        else:
            raise NotReplayable("the gradients were clipped by a function of the user's, which no bundle holds")

    def _step(self, step: OptimizerStep) -> None:
        optimizer = self.replayer.subject.optimizers[step.optimizer]
        if _needs_closure(optimizer):
            raise NotReplayable("the optimizer computes the loss itself, by a closure of the user's")
        for group, recorded in zip(optimizer.param_groups, step.groups):
            group.update({k: copied(v) for k, v in recorded.items() if k != "params"})
            group["lr"] = group["lr"] * self.intervention.lr if self.intervention.lr != 1.0 else group["lr"]
            group.update(
                self.intervention.group(self.recorded.step, group) if self.intervention.group is not None else {}
            )
        self._read_grads()
        self.result.before = _weights(self.replayer)
        if "vetoed" not in self.recorded.values:
            with torch.enable_grad():
                optimizer.step()
        self.result.after = _weights(self.replayer)

    def _read_grads(self) -> None:
        named = zip(self.replayer.names, self.replayer.subject.parameters)
        self.result.grads = {name: None if p.grad is None else p.grad.detach().clone() for name, p in named}
        dense = [g for g in self.result.grads.values() if g is not None and not g.is_sparse]
        self.result.grad_norm = float(torch.nn.utils.get_total_norm(dense)) if dense else 0.0

    def _read(self, written: Any, loss: bool = False) -> Any:
        """Returns arguments with tensors instead of slots and constants."""
        rows = self.intervention.rows
        size = None if rows is None else batch_size(self.recorded)

        def tensor_of(leaf: object) -> object:
            if isinstance(leaf, Slot):
                if leaf.number not in self.slots:
                    raise NotReplayable("a tensor of the loss was made before this step")
                return self.slots[leaf.number]
            if not isinstance(leaf, Constant):
                return leaf
            if not leaf.is_unchanged and not isinstance(leaf.tensor, nn.Parameter):
                raise NotReplayable("an input was written to after it was used")
            tensor = leaf.tensor
            if isinstance(tensor, nn.Parameter):
                return tensor
            if rows is not None and tensor.dim() and tensor.shape[0] == size:
                tensor = tensor[list(rows)]
            if self.intervention.dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(DTYPES[self.intervention.dtype])
            if loss and self.intervention.constants is not None:
                tensor = self.intervention.constants(tensor)
            return tensor

        return mapped(written, tensor_of)

    def _autocast(self, autocast: Autocast) -> AbstractContextManager[object]:
        on, dtype, _ = autocast
        if not on or self.intervention.dtype is not None:
            return nullcontext()
        return torch.autocast(self.replayer.device.type, dtype)

    def _ops(self) -> AbstractContextManager[object]:
        return nullcontext() if self.intervention.ops is None else _HandledOps(self.intervention.ops)


class _HandledOps(TorchFunctionMode):
    def __init__(self, handler: OpHandler) -> None:
        super().__init__()
        self._handler = handler

    def __torch_function__(
        self, function: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        return self._handler(function, args, kwargs or {})


def batch_size(recorded: RecordedStep) -> int | None:
    """Returns the first dimension of the first input tensor of a model; None if no input has a dimension."""
    for call in recorded.calls:
        for value in (*call.args, *call.kwargs.values()):
            for constant in (value,) if type(value) is Constant else constants_of(value):
                if constant.tensor.dim():
                    return constant.tensor.size(0)  # a nested tensor has no shape
    return None


def _select(program: list[Instruction], micro: Sequence[int] | None) -> list[Instruction]:
    """Returns the program with only the micro-batches ``micro``, in this order; None: all of them.

    A micro-batch ends with its backward pass.
    """
    if micro is None:
        return program
    parts: list[list[Instruction]] = [[]]
    tail: list[Instruction] = []
    for each in program:
        if isinstance(each, Multiply | ClipGradients | OptimizerStep):
            tail.append(each)
            continue
        parts[-1].append(each)
        if isinstance(each, Backward):
            parts.append([])
    zeros = [each for each in parts[0] if isinstance(each, ZeroGrad)]
    wanted = [each for number in micro for each in parts[number] if not isinstance(each, ZeroGrad)]
    return [*zeros, *wanted, *tail]


def _needs_closure(optimizer: Optimizer) -> bool:
    """Return True for an optimizer such as LBFGS, whose method ``step`` requires a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _weights(replayer: Replayer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in zip(replayer.names, replayer.subject.parameters)}
