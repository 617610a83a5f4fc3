"""Runs a recorded step again on the live objects, bit for bit or with one thing changed, and leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.overrides import TorchFunctionMode

from trainwright.engine.clip import make_clip
from trainwright.recorder.graph import leaves_of
from trainwright.recorder.program import (
    Autocast,
    Backward,
    Call,
    ClipGradients,
    Constant,
    Multiply,
    Operation,
    OptimizerStep,
    RecordedStep,
    Slot,
    ZeroGrad,
    constants_of,
    mapped,
    tensors_of,
)
from trainwright.replay.stage import NotReplayable as NotReplayable
from trainwright.replay.stage import fresh, staged
from trainwright.state.snapshot import LiveObjects, Snapshot

Upto = Literal["forward", "backward", "step"]


@dataclass(frozen=True)
class Intervention:
    """What is done otherwise than it was. Nothing by default: then the replay is the same bits."""

    inputs: Callable[[int, Any, Any], tuple[Any, Any]] | None = None
    constants: Callable[[Tensor], Tensor] | None = None
    ops: Callable[[Callable[..., Any], Any, Any], Any] | None = None
    rows: Sequence[int] | None = None
    micro: Sequence[int] | None = None
    loss_scale: float = 1.0
    sign: float = 1.0
    dtype: Literal["fp32", "fp64"] | None = None
    mode: Literal["train", "eval"] | None = None
    lr: float = 1.0
    group: Callable[[int, dict[str, Any]], dict[str, Any]] | None = None  # what to set in a group, by step
    clip: float | None = None  # the threshold of every clip
    model: Callable[[], AbstractContextManager[Any]] | None = None
    fresh_rng: bool = False


AS_IT_WAS = Intervention()


@dataclass
class ReplayResult:
    """What a replay gave. Tensors are copies; ``losses`` are as given to backward, without a loss scale."""

    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
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
    """Plays segments on the live objects of a Subject while everything of theirs is set aside."""

    def __init__(self, subject: LiveObjects, names: Sequence[str]) -> None:
        self.subject, self.names = subject, list(names)
        self.known = frozenset(id(p) for p in subject.parameters)

    @contextmanager
    def stage(self, snapshot: Snapshot) -> Iterator[None]:
        """Inside, the live objects are in the state of ``snapshot``; afterwards they are what they were."""
        with self._away_from_autocast(), staged(self.subject, snapshot):
            yield

    def _away_from_autocast(self) -> AbstractContextManager[Any]:
        """Where autocast is round the loop: a replay neither reads the weights that it has cached nor adds any."""
        parameters = self.subject.parameters
        device = parameters[0].device.type if parameters else "cpu"
        if not torch.is_autocast_enabled(device):
            return nullcontext()
        return torch.autocast(device, enabled=False, cache_enabled=False)

    def play(self, segment: RecordedStep, edit: Intervention = AS_IT_WAS, *, upto: Upto = "step") -> ReplayResult:
        """One segment, inside ``stage``. What raises in the user's code comes back as ``error``."""
        return _Performance(self, segment, edit, upto).run()


@dataclass
class _Performance:
    """One run of one segment."""

    player: Replayer
    segment: RecordedStep
    edit: Intervention
    upto: Upto
    env: dict[int, Any] = field(default_factory=dict)
    played: ReplayResult = field(default_factory=ReplayResult)
    calls: int = 0
    around: ExitStack = field(default_factory=ExitStack)

    def run(self) -> ReplayResult:
        segment, parameters = self.segment, self.player.subject.parameters
        carried = segment.values.get("carried")
        for parameter, grad in zip(parameters, carried or []):
            parameter.grad = None if grad is None else grad.clone()
        with self.around as around:
            if self.edit.model is not None:
                around.enter_context(self.edit.model())
            if self.edit.dtype is not None:
                around.enter_context(_cast(self.player.subject, self.edit.dtype))
            try:
                for each in _chosen(segment.program, self.edit.micro):
                    self._do(each)
            except NotReplayable:
                raise
            except Exception as error:
                self.played.error = error
            if self.upto == "backward":
                self._read_grads()
            elif self.upto == "step" and not self.played.after:  # a scaler has skipped it
                self._read_grads()
                self.played.before = self.played.after = _weights(self.player)
        return self.played

    def _do(self, each: Any) -> None:
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
        root = self.player.subject.roots[call.root].get_submodule(call.part)
        args, kwargs = self._read(call.args), self._read(call.kwargs)
        if self.edit.inputs is not None:
            args, kwargs = self.edit.inputs(self.calls, args, kwargs)
        self.calls += 1
        if not self.edit.fresh_rng:
            torch.set_rng_state(call.rng[0])
            if call.rng[1] is not None:
                torch.cuda.set_rng_state(call.rng[1])
        for module, training in zip(self.player.subject.modules, call.training):
            module.training = training if self.edit.mode is None else self.edit.mode == "train"
        for parameter, wanted in zip(self.player.subject.parameters, call.wanted):
            if parameter.requires_grad != wanted:
                parameter.requires_grad_(wanted)
        with self._autocast(call.autocast), self._ops():
            output = root(*args, **kwargs)
        made = tensors_of(output)
        self.env.update(zip(call.outputs, made))
        self.played.outputs.append(mapped(output, lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf))

    def _operation(self, operation: Operation) -> None:
        args, kwargs = self._read(operation.args, True), self._read(operation.kwargs, True)
        with self._autocast(operation.autocast), self._ops():
            result = operation.function(*args, **kwargs)
        made = [result] if isinstance(result, Tensor) else [r for r in result if isinstance(r, Tensor)]
        self.env.update(zip(operation.outputs, made))

    def _backward(self, backward: Backward) -> None:
        if backward.slot is None or backward.slot not in self.env:
            raise NotReplayable("the loss is not made of what the watched model returned")
        loss = self.env[backward.slot]
        self.played.losses.append((loss.detach() / backward.scale if backward.scale != 1.0 else loss.detach()).clone())
        if self.upto == "forward" or not loss.requires_grad:
            return
        factor = self.edit.loss_scale * self.edit.sign
        gradient = self._read(backward.gradient)
        inputs = None if backward.inputs is None else self._read(backward.inputs)
        for leaf in leaves_of(loss) or ():
            if id(leaf) not in self.player.known:  # an input that wants a gradient, a parameter of nobody's
                self.around.callback(setattr, leaf, "grad", leaf.grad)
                leaf.grad = None
        loss = loss * factor if factor != 1.0 else loss
        torch.autograd.backward(loss, gradient, retain_graph=backward.retain, inputs=inputs)

    def _zero(self, zero: ZeroGrad) -> None:
        subject = self.player.subject
        optimizers = subject.optimizers if zero.optimizer is None else [subject.optimizers[zero.optimizer]]
        for optimizer in optimizers:
            optimizer.zero_grad()
        if zero.optimizer is None:
            for parameter in subject.parameters:
                parameter.grad = None

    @torch.no_grad()
    def _update(self, each: Multiply | ClipGradients | OptimizerStep) -> None:
        parameters = self.player.subject.parameters
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
        at = clip.at if self.edit.clip is None else self.edit.clip
        if clip.by == "norm":
            self.played.norm_at_clip = float(clip_grad_norm_(parameters, at))
        elif clip.by == "value":
            clip_grad_value_(parameters, at)
        elif (function := make_clip("agc", at) if clip.by == "agc" else clip.function) is not None:
            with_grad = [p for p in parameters if p.grad is not None]
            norm = get_total_norm([p.grad for p in with_grad if p.grad is not None])
            self.played.norm_at_clip = float(norm)
            function(with_grad, norm)
        else:
            raise NotReplayable("the gradients were clipped by a function of the user's, which no bundle holds")

    def _step(self, step: OptimizerStep) -> None:
        if step.closure:
            raise NotReplayable("the optimizer calls a closure")
        optimizer = self.player.subject.optimizers[step.optimizer]
        for group, recorded in zip(optimizer.param_groups, step.groups):
            group.update({k: fresh(v) for k, v in recorded.items() if k != "params"})
            group["lr"] = group["lr"] * self.edit.lr if self.edit.lr != 1.0 else group["lr"]
            group.update(self.edit.group(self.segment.step, group) if self.edit.group is not None else {})
        self._read_grads()
        self.played.before = _weights(self.player)
        if "vetoed" not in self.segment.values:
            with torch.enable_grad():
                optimizer.step()
        self.played.after = _weights(self.player)

    def _read_grads(self) -> None:
        named = zip(self.player.names, self.player.subject.parameters)
        self.played.grads = {name: None if p.grad is None else p.grad.detach().clone() for name, p in named}
        dense = [g for g in self.played.grads.values() if g is not None and not g.is_sparse]
        self.played.grad_norm = float(torch.nn.utils.get_total_norm(dense)) if dense else 0.0

    def _read(self, written: Any, loss: bool = False) -> Any:
        """Slots and constants become tensors again."""
        size = batch_size(self.segment)

        def tensor_of(leaf: Any) -> Any:
            if isinstance(leaf, Slot):
                if leaf.number not in self.env:
                    raise NotReplayable("a tensor of the loss was made before this step")
                return self.env[leaf.number]
            if not isinstance(leaf, Constant):
                return leaf
            if not leaf.is_unchanged and not isinstance(leaf.tensor, nn.Parameter):
                raise NotReplayable("an input was written to after it was used")
            tensor = leaf.tensor
            if isinstance(tensor, nn.Parameter):
                return tensor
            if self.edit.rows is not None and tensor.dim() and tensor.shape[0] == size:
                tensor = tensor[list(self.edit.rows)]
            if self.edit.dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(_DTYPES[self.edit.dtype])
            if loss and self.edit.constants is not None:
                tensor = self.edit.constants(tensor)
            return tensor

        return mapped(written, tensor_of)

    def _autocast(self, autocast: Autocast) -> AbstractContextManager[Any]:
        on, dtype, _ = autocast
        device = self.player.subject.parameters[0].device.type if self.player.subject.parameters else "cpu"
        if not on or self.edit.dtype is not None:
            return nullcontext()
        return torch.autocast(device, dtype)

    def _ops(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.edit.ops is None else _Around(self.edit.ops)


_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class _Around(TorchFunctionMode):
    def __init__(self, around: Callable[[Callable[..., Any], Any, Any], Any]) -> None:
        super().__init__()
        self._around = around

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._around(function, args, kwargs or {})


def batch_size(segment: RecordedStep) -> int | None:
    """The first dimension of the first tensor that a model was given."""
    for call in segment.calls:
        for constant in constants_of((call.args, call.kwargs)):
            if constant.tensor.dim():
                return int(constant.tensor.shape[0])
    return None


def _chosen(program: list[Any], micro: Sequence[int] | None) -> list[Any]:
    """Only these micro-batches, in this order: a micro-batch ends with its backward pass."""
    if micro is None:
        return program
    parts: list[list[Any]] = [[]]
    tail: list[Any] = []
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


@contextmanager
def _cast(subject: LiveObjects, name: Literal["fp32", "fp64"]) -> Iterator[None]:
    """All floating weights and buffers in another dtype. Inside ``stage`` they are copies already."""
    dtype = _DTYPES[name]
    before = [p.data for p in subject.parameters]
    grads = [p.grad for p in subject.parameters]
    buffers = [(m, n, m._buffers[n]) for m, n in subject.buffers()]
    for p in subject.parameters:
        p.grad = None
        p.data = p.data.to(dtype) if p.is_floating_point() else p.data
    for module, key, buffer in buffers:
        if buffer is not None and buffer.is_floating_point():
            module._buffers[key] = buffer.to(dtype)
    try:
        yield
    finally:
        for p, data, grad in zip(subject.parameters, before, grads):
            p.grad = None
            p.data = data
            p.grad = grad
        for module, key, buffer in buffers:
            module._buffers[key] = buffer


def _weights(player: Replayer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in zip(player.names, player.subject.parameters)}
