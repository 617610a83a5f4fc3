"""Writes the program of every step down while the loop runs it; reads, and changes nothing."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from trainwright.recorder.callers import caller
from trainwright.recorder.graph import leaves_of
from trainwright.recorder.hooks import Listener
from trainwright.recorder.listener import inside
from trainwright.recorder.program import (
    Backward,
    Call,
    ClipGradients,
    Ids,
    Multiply,
    OptimizerStep,
    RecordedStep,
    ZeroGrad,
    tensors_of,
)
from trainwright.recorder.tape import Tape, autocast_now

_LONGEST = 4096
"""Calls, operations, events, ... that one step may have."""


class LoopRecorder(Listener):
    """One Segment for each optimizer step. ``closed`` is called with each when it is over.

    A step of several optimizers that take turns (a GAN) is over when each of them has stepped. A step whose update is
    skipped ends without an optimizer: whoever knows that calls ``close``.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        closed: Callable[[RecordedStep], None],
        *,
        before_update: Callable[[RecordedStep, Optimizer], None],
        after_update: Callable[[RecordedStep, Optimizer], None],
        first_step: int = 1,
    ) -> None:
        self.roots, self.optimizers = list(roots), list(optimizers)
        self._closed, self._before_update, self._after_update = closed, before_update, after_update
        self.parameters = _unique([p for o in optimizers for g in o.param_groups for p in g["params"]], roots)
        self._numbers = {id(p): number for number, p in enumerate(self.parameters)}
        self.device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self.tape = Tape(self.device.type)
        self.segment = RecordedStep(first_step)
        self.budget_bytes = math.inf  # of what one step may hold
        self.careful = False  # whether to see what the loop does to gradients by hand, and which line makes each call
        self._last_lines: list[list[str]] | None = None
        self._versions: list[tuple[int, int] | None] | None = None
        self._edits = self._is_foreign = self._retains = False
        self._last_wanted: tuple[bool, ...] = ()
        self._root_of = {id(m): number for number, root in enumerate(roots) for m in root.modules()}
        self._paths = {id(m): path for root in roots for path, m in root.named_modules()}
        self._paths |= {id(root): "" for root in roots}
        self._root_of |= {id(root): number for number, root in enumerate(roots)}
        self.misses_calls = False  # a loss came of our parameters, and no call of a root was heard
        self._modules = list({id(m): m for root in roots for m in root.modules()}.values())
        self._last_modes: tuple[bool, ...] = ()
        self._last_rng: Tensor | None = None
        self._depth = 0
        self._call: Call | None = None
        self._stepped: set[int] = set()
        self._scales: dict[int, tuple[Tensor, Any, float | Tensor]] = {}
        self._fetched: deque[tuple[Ids, set[int]]] = deque(maxlen=16)
        self._ended_s = time.perf_counter()
        self._waited_s = 0.0

    def _happened(self, kind: str, value: object) -> None:
        """An event; in a step that will be looked at, with the line of the user's source that it comes from."""
        self.segment.events.append((kind, value))
        if self.careful and (line := caller()) is not None:
            self.segment.values.setdefault("lines", []).append([kind, line])

    # what is consumed

    def on_batch(self, iterator: Any, ids: Any, batch: Any, wait_s: float) -> None:
        self._waited_s += wait_s
        self._fetched.append((_as_ids(ids), _places(batch)))

    def _take_ids(self, given: Any) -> None:
        """The ids of the batch that a call is given. Many trainers fetch the next one before they use this one."""
        if self._fetched:
            places = _places(given)
            found = next((each for each in self._fetched if not places.isdisjoint(each[1])), self._fetched[-1])
            while self._fetched.popleft() is not found:
                pass
            self.segment.ids.append(found[0])

    def on_forward(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth > 1:  # a root inside another
            return
        grad = torch.is_grad_enabled()
        index = self._root_of[id(root)]
        self._happened("forward", (index, root.training, grad))
        if not grad:
            return
        self.tape.stop()  # what the model does is not the loop's doing, and a mode on the stack would be compiled in
        self._shorten()
        self._take_ids((args, kwargs))
        written = self.tape.write((args, kwargs))
        now = autocast_now(self.device.type)
        self._call = Call(index, written[0], written[1], self._rng(), self._modes(), now)
        self._call.part = self._paths[id(root)]
        self._call.batch, self._call.wanted = len(self.segment.ids) - 1, self._wanted()
        self.segment.program += self.tape.operations
        self.tape.operations = []
        self.segment.program.append(self._call)

    def _modes(self) -> tuple[bool, ...]:
        modes = tuple([module.training for module in self._modules])
        if modes != self._last_modes:  # one tuple for all steps that have the same
            self._last_modes = modes
        return self._last_modes

    def _wanted(self) -> tuple[bool, ...]:
        wanted = tuple([p.requires_grad for p in self.parameters])
        if wanted != self._last_wanted:
            self._last_wanted = wanted
        return self._last_wanted

    def _shorten(self) -> None:
        """A loop that calls the model again and again and never makes an update would fill the memory."""
        segment = self.segment
        if len(segment.events) > _LONGEST:
            del segment.events[: _LONGEST // 2]
        if len(segment.program) > _LONGEST or self.tape.num_bytes > self.budget_bytes:
            segment.program.clear()
            segment.losses.clear()
            segment.ids.clear()
            self.tape.forget()
            self.tape.num_bytes = 0
            segment.blind = "between two updates there was more than the recorder may hold"

    def _rng(self) -> tuple[Tensor, Tensor | None]:
        """The generators' states; the same tensor as before where nothing was drawn, which costs no memory."""
        now = torch.default_generator.get_state()
        if self._last_rng is None or not torch.equal(now, self._last_rng):
            self._last_rng = now
        return self._last_rng, torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None

    def on_output(self, root: nn.Module, output: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth or self._call is None:
            return
        if output is None:
            self.segment.blind = "a forward pass raised, or returned nothing"
        self._call.outputs = self.tape.outputs(output)
        self._call = None
        self.tape.start()

    # gradients

    def on_scaled(self, scaler: Any, given: Any, scaled: Any) -> None:
        if isinstance(given, Tensor) and isinstance(scaled, Tensor) and scaled is not given:
            scale: Any = scaler._scale if isinstance(scaler, GradScaler) else scaler.scale
            on_gpu = isinstance(scale, Tensor) and scale.device.type != "cpu"
            scale_at = scale.detach().clone() if on_gpu else float(scale)  # a GPU is not waited for
            self._scales[id(scaled)] = (scaled, given.detach(), scale_at)

    def on_backward_called(self) -> None:
        self.tape.stop()

    def on_backward(self, losses: tuple[Tensor, ...], how: dict[str, Any]) -> None:
        self.tape.stop()
        self._is_foreign = not any(self._is_ours(loss) for loss in losses)
        if self._is_foreign:
            return
        self._retains = bool(how.get("retain_graph"))
        self.segment.program += self.tape.operations
        self.tape.operations = []
        gradients = how.get("grad_tensors") or [None] * len(losses)
        gradients = [gradients] if isinstance(gradients, Tensor) else list(gradients)
        carried = not self._has_backward() and any(p.grad is not None for p in self.parameters)
        for loss, gradient in zip(losses, gradients):
            self._note_backward(loss, gradient, how)
        if carried:
            self.segment.values["carried"] = _grads(self.parameters)
        cut = not losses[0].requires_grad or (losses[0].is_leaf and id(losses[0]) not in self._numbers)
        self._happened("backward", {"carried": carried, "cut": cut, "retain": bool(how.get("retain_graph"))})

    def _note_backward(self, loss: Tensor, gradient: Any, how: dict[str, Any]) -> None:
        slot = self.tape.slot_of(loss)
        _, value, scale = self._scales.get(id(loss), (loss, loss.detach(), 1.0))
        if slot is None and self.segment.blind is None:
            self.segment.blind = "the loss is not made of what the watched model returned"
            self.misses_calls |= loss.grad_fn is not None and not self.segment.calls
        self.segment.losses.append(value)
        backward = Backward(slot, value, scale, None if gradient is None else self.tape.write(gradient))
        backward.retain = bool(how.get("retain_graph") or how.get("create_graph"))
        if how.get("create_graph"):
            self.segment.blind = "backward(create_graph=True) gives gradients that have a graph of their own"
        if (inputs := how.get("inputs")) is not None:
            backward.inputs = self.tape.write([inputs] if isinstance(inputs, Tensor) else list(inputs))
        self.segment.program.append(backward)

    def _is_ours(self, loss: Tensor) -> bool:
        """Whether a loss that is not made of our outputs, as far as we have seen, reaches our parameters even so."""
        is_known = self.tape.slot_of(loss) is not None and not self.tape.leaves
        if is_known or loss.grad_fn is None:
            return True
        leaves = leaves_of(loss)
        return not leaves or any(id(leaf) in self._numbers for leaf in leaves)

    def on_autograd_grad(self, outputs: Any, inputs: Any, how: dict[str, Any]) -> None:
        """Training without backward. With ``create_graph`` it is a part of a loss instead."""
        outputs, inputs = ([each] if isinstance(each, Tensor) else list(each) for each in (outputs, inputs))
        if how.get("create_graph") or not any(id(each) in self._numbers for each in inputs):
            return
        self._happened("autograd_grad", len(inputs))
        self.segment.losses += [each.detach() for each in outputs if each.numel() == 1]
        self.segment.blind = "the gradients are made by torch.autograd.grad, and what becomes of them is not seen"

    def _has_backward(self) -> bool:
        return any(isinstance(each, Backward) for each in self.segment.program)

    def on_gradients(self) -> None:
        if self._is_foreign or self._retains:
            self.tape.start()  # there is more to come
        if self._is_foreign:
            return
        self.on_gradients_changed()
        self._scales.clear()
        if self.tape.grafted:
            self.segment.values["grafted"] = True
            self.tape.grafted = False

    def on_gradients_changed(self) -> None:
        """``versions`` of the gradients as they are known: the loop may change them by hand before its update."""
        self._versions = _versions(self.parameters) if self.careful else None

    def on_zero_grad(self, owner: Optimizer | nn.Module) -> None:
        self._versions = None
        if isinstance(owner, Optimizer):
            if owner not in self.optimizers:
                return
            self.segment.program.append(ZeroGrad(self.optimizers.index(owner)))
            self._happened("zero_grad", self.optimizers.index(owner))
        elif owner in self.roots:
            self.segment.program.append(ZeroGrad(None))
            self._happened("zero_grad", -1)

    def begin_again(self) -> None:
        """The step so far is dropped: it ran out of memory, and nothing of that try is held."""
        self.tape.stop()
        self.tape.forget()
        self.tape.num_bytes, self.tape.failed = 0, None
        self._scales.clear()
        self._depth, self._call = 0, None
        self.segment = RecordedStep(self.segment.step)

    def on_unscale(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        if scaler.is_enabled() and optimizer in self.optimizers:
            scale = scaler._scale
            factor = None if scale is None else scale.detach().clone().double().reciprocal().float()
            numbers = [self._numbers[id(p)] for p in _owned(optimizer) if id(p) in self._numbers]
            self.segment.program.append(Multiply(numbers, factor))
            self._happened("unscale", self.optimizers.index(optimizer))

    def on_multiplied(self, factor: Any) -> None:
        self.segment.program.append(Multiply(None, factor.detach().clone() if isinstance(factor, Tensor) else factor))
        self._happened("multiply", None)

    def on_clip(self, by: str, at: float, parameters: list[Tensor], norm: Tensor | None, function: Any = None) -> None:
        numbers = [self._numbers[id(p)] for p in parameters if id(p) in self._numbers]
        self.segment.program.append(ClipGradients(by, at, numbers, function))
        seen = None if norm is None else norm.detach()
        self._happened("clip", {"by": by, "at": at, "norm": seen, "parameters": len(parameters)})

    # the update

    def on_step(self, optimizer: Optimizer, args: tuple[Any, ...]) -> None:
        if optimizer not in self.optimizers:
            self._happened("other_step", self._shared_with(optimizer))
            return
        index = self.optimizers.index(optimizer)
        if self._versions is not None and self._versions != _versions(self.parameters):
            self._edits = True
        if self._edits:  # seen once: from then on in every step, looked at or not
            self.segment.values["edited"] = True
        groups = [_hyperparameters(group) for group in optimizer.param_groups]
        step = OptimizerStep(index, groups, getattr(optimizer, "grad_scale", None))
        self.segment.lr = float(groups[0].get("lr", 0.0)) if index == 0 else self.segment.lr
        self._happened("step", {"optimizer": index, "autocast": torch.is_autocast_enabled(self.device.type)})
        if inside.backward:
            self.segment.blind = "the optimizer steps inside of backward"
        self._before_update(self.segment, optimizer)
        self.segment.program.append(step)

    def _shared_with(self, optimizer: Optimizer) -> int:
        """How many of its parameters are ours: an optimizer that nobody named."""
        return sum(id(p) in self._numbers for p in _owned(optimizer))

    def on_closure_again(self, optimizer: Optimizer) -> None:
        if optimizer in self.optimizers:
            self.segment.blind = "the optimizer calls its closure several times in a step"

    def on_stepped(self, optimizer: Optimizer) -> None:
        if optimizer in self.optimizers:
            self._after_update(self.segment, optimizer)
            self._one_stepped(optimizer)

    def on_scaler_step(self, scaler: GradScaler, optimizer: Optimizer, stepped: bool) -> None:
        if optimizer in self.optimizers and not stepped:
            self._happened("scaler_skipped", self.optimizers.index(optimizer))
            self._before_update(self.segment, optimizer)
            self._one_stepped(optimizer)

    def on_scaler_update(self, scaler: GradScaler) -> None:
        self._happened("scaler_update", float(scaler.get_scale()) if self.device.type == "cpu" else None)

    def _one_stepped(self, optimizer: Optimizer) -> None:
        index = self.optimizers.index(optimizer)
        again = index in self._stepped
        self._stepped.add(index)
        if again or len(self._stepped) == len(self.optimizers):
            self.close()

    def on_schedule(self, scheduler: Any) -> None:
        self._happened("schedule", type(scheduler).__name__)

    def close(self) -> None:
        """The step is over; what comes now belongs to the next."""
        done, now_s = self.segment, time.perf_counter()
        self.tape.stop()
        self.tape.forget()
        self._stepped.clear()
        self._scales.clear()
        self._depth, self._call, self._versions = 0, None, None
        done.ended_s = time.time()
        done.num_bytes, self.tape.num_bytes = self.tape.num_bytes, 0
        done.values["step_s"], done.values["wait_s"] = now_s - self._ended_s, self._waited_s
        if (lines := done.values.get("lines")) is not None:
            if lines == self._last_lines:  # told once
                del done.values["lines"]
            self._last_lines = lines
        self.segment = RecordedStep(done.step + 1)
        self._closed(done)
        self._ended_s, self._waited_s = time.perf_counter(), 0.0

    def fail(self, error: Exception) -> None:
        super().fail(error)
        self.tape.stop()
        self.tape.forget()


def _versions(parameters: Sequence[Tensor]) -> list[tuple[int, int] | None]:
    """Changes whenever a gradient is replaced or written to."""
    grads = [p.grad for p in parameters]
    return [None if grad is None else (id(grad), grad._version) for grad in grads]


def _unique(parameters: list[Tensor], roots: Sequence[nn.Module]) -> list[Tensor]:
    """Parameters of the roots first, then those that only an optimizer has."""
    every = [p for root in roots for p in root.parameters()] + parameters
    return list({id(p): p for p in every}.values())


def _owned(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _grads(parameters: Sequence[Tensor]) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in parameters]


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """A copy: the learning rate may be a tensor that its scheduler writes to."""
    copy = {**group, "params": None}
    if isinstance(copy.get("lr"), Tensor):
        copy["lr"] = copy["lr"].detach().clone()
    return copy


def _places(value: Any) -> set[int]:
    """Where the tensors of a batch lie in memory: a part of one lies there too."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_of(value, 3) if tensor.layout is torch.strided}


def _as_ids(ids: Any) -> Ids:
    if isinstance(ids, list | tuple) and all(isinstance(each, int) for each in ids):
        return tuple(ids)
    return (ids,) if isinstance(ids, int) else None
