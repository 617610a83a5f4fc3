"""Records the calls that make and change gradients: loss scale, backward, unscale, clipping, zero_grad."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from trainwright.recorder.callers import caller
from trainwright.recorder.carried import CarriedGradients, Versions, num_gradients, versions_of_gradients
from trainwright.recorder.graph import leaves_of
from trainwright.recorder.listener import Listener
from trainwright.recorder.program import Backward, ClipGradients, Multiply, RecordedStep, ZeroGrad
from trainwright.recorder.ranks import COMMUNICATES, has_others, num_collectives
from trainwright.recorder.tape import Tape
from trainwright.recorder.unused import UnusedGradients
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction


class ScaledLosses:
    """The losses of a step that were multiplied by a loss scale."""

    def __init__(self) -> None:
        self.by_id: dict[int, tuple[Tensor, Tensor, float | Tensor]] = {}

    def add(self, scaler: object, loss: object, scaled: object) -> None:
        """Records that ``scaled`` is ``loss`` times the scale of ``scaler``, which is torch's or Trainwright's."""
        if isinstance(loss, Tensor) and isinstance(scaled, Tensor) and scaled is not loss:
            scale = getattr(scaler, "_scale" if isinstance(scaler, GradScaler) else "scale")
            on_gpu = isinstance(scale, Tensor) and scale.device.type != "cpu"
            scale_at = scale.detach().clone() if on_gpu else float(scale)  # does not wait for a GPU
            self.by_id[id(scaled)] = (scaled, loss.detach(), scale_at)

    def unscaled(self, loss: Tensor) -> tuple[Tensor, float | Tensor]:
        """Returns the loss without its scale, and the scale; 1.0 for an unscaled loss."""
        _, value, scale = self.by_id.get(id(loss)) or (loss, loss.detach(), 1.0)
        return value, scale


class GradientRecorder(Listener):
    """Writes all calls that make or change gradients into ``current``, the current RecordedStep.

    ``parameters`` are those of the roots first, then those that only an optimizer has. ``careful`` also records the
    user's source line of each call, which costs time. While ``is_light``, only losses and updates are recorded.
    """

    def __init__(self, roots: Sequence[nn.Module], optimizers: Sequence[Optimizer], first_step: int) -> None:
        self.roots, self.optimizers = list(roots), list(optimizers)
        self.parameters = parameters_of(roots, optimizers)
        self._numbers = {id(p): number for number, p in enumerate(self.parameters)}
        self.device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self.tape = Tape(self.device.type)
        self.current = RecordedStep(first_step)
        self._is_careful = False
        self.is_light = False
        self.misses_calls = False  # a loss depends on watched parameters, and no call of a root was recorded
        self._scaled_losses = ScaledLosses()
        self._versions: Versions | None = None
        self._is_foreign = self._retains = False
        self._was_taped = False  # the tape was running when backward was called
        self.saw_others = False  # backward was called on a loss without watched parameters
        self._edits = False  # the loop changes gradients by hand
        self._unused = UnusedGradients()
        self._carried = CarriedGradients()
        self._is_clipped = self._was_clipped = False  # gradients were clipped in this step, and in the last one
        self._clipped: list[int] = []
        self._clipped_numbers: list[int] = []
        self._has_others = has_others()
        self._num_collectives = num_collectives()  # counted before the first forward call of the step

    @property
    def careful(self) -> bool:
        return self._is_careful

    @careful.setter
    def careful(self, value: bool) -> None:
        self._is_careful = self.tape.is_careful = value

    def stop_modes(self) -> None:
        """Stops observing torch functions."""
        self.tape.stop()
        self._unused.forget()

    def _happened(self, kind: str, value: object) -> None:
        """Adds an event; in careful mode also the line of the user's source that caused it."""
        self.current.events.append((kind, value))
        if self._is_careful and (line := caller()) is not None:
            self.current.values.setdefault("lines", []).append([kind, line])

    def on_scaled(self, scaler: object, loss: object, scaled: object) -> None:
        self._scaled_losses.add(scaler, loss, scaled)

    def on_apply(self) -> None:
        self.tape.begin_apply()

    def on_applied(self, apply: TorchFunction, args: Args, kwargs: Kwargs, result: object) -> None:
        self.tape.end_apply(apply, args, kwargs, result)

    def on_backward_called(self) -> None:
        if self.tape.pushed:
            self._was_taped = True
            self.tape.stop()

    def on_backward(self, losses: tuple[Tensor, ...], options: Kwargs) -> None:
        if self.is_light:
            self.current.losses += [self._scaled_losses.unscaled(each)[0] for each in losses if each.numel() == 1]
            return
        if self.tape.pushed:
            self._was_taped = True
            self.tape.stop()
        if self._unused.reads.pushed:
            self._unused.reads.stop()
        self._is_foreign = not any(map(self._is_ours, losses))
        self.saw_others = self.saw_others or self._is_foreign
        if self._is_foreign:
            self.tape.drop_dead()
            return
        self._retains = bool(options.get("retain_graph"))
        self.current.program += self.tape.operations
        self.tape.operations = []
        given = options.get("grad_tensors")
        gradients = [None] * len(losses) if given is None else _as_list(given)
        carried = not self._has_backward() and num_gradients(self.parameters) > 0
        for loss, gradient in zip(losses, gradients):
            self._note_backward(loss, gradient, options)
        if carried:
            self.current.values["carried"] = _copies_of_gradients(self.parameters)
        cut = not losses[0].requires_grad or (losses[0].is_leaf and id(losses[0]) not in self._numbers)
        self._happened("backward", {"carried": carried, "cut": cut, "retain": bool(options.get("retain_graph"))})

    def _note_backward(self, loss: Tensor, gradient: object, options: Kwargs) -> None:
        slot = self.tape.slot_of(loss)
        value, scale = self._scaled_losses.unscaled(loss)
        if slot is None and self.current.blind is None:
            self.current.blind = "the loss does not depend on the output of the watched model"
            self.misses_calls |= loss.grad_fn is not None and not self.current.calls
        if value.numel() == 1:  # else it continues a backward pass: hidden.backward(its_gradient)
            self.current.losses.append(value)
        backward = Backward(slot, value, scale, None if gradient is None else self.tape.write(gradient))
        backward.retain = bool(options.get("retain_graph") or options.get("create_graph"))
        if options.get("create_graph"):
            self.current.blind = "backward(create_graph=True) gives gradients with a graph"
        if (inputs := options.get("inputs")) is not None:
            backward.inputs = self.tape.write([inputs] if isinstance(inputs, Tensor) else list(inputs))
        self.current.program.append(backward)

    def _is_ours(self, loss: Tensor) -> bool:
        """Returns True if a loss depends on watched parameters, even through unrecorded operations, or has no graph."""
        is_known = self.tape.slot_of(loss) is not None and not self.tape.leaves
        if is_known or loss.grad_fn is None:
            return True
        leaves = leaves_of([loss])
        return not leaves or any(id(leaf) in self._numbers for leaf in leaves)

    def on_autograd_grad(self, outputs: object, inputs: object, options: Kwargs) -> None:
        """Records gradients for an update without backward. Ignores ``create_graph``: these are part of a loss."""
        variables = _as_list(inputs)
        if options.get("create_graph") or not any(id(each) in self._numbers for each in variables):
            return
        self._happened("autograd_grad", len(variables))
        self.current.grad_losses += [each.detach() for each in _as_list(outputs) if each.numel() == 1]
        self.current.blind = "the gradients come from torch.autograd.grad, and their use is not recorded"

    def _has_backward(self) -> bool:
        return Backward in map(type, self.current.program)

    def on_gradients(self) -> None:
        if self.is_light:
            return
        if self._retains or (self._is_foreign and self._was_taped):
            self.tape.start()  # more operations on the loss may follow
        self._was_taped = False
        if self._is_foreign:
            return
        if self._was_clipped:
            self._versions = None  # a clip will change them as in the last step; reading takes 1 % of a small step
        else:
            self.on_gradients_changed()
        if self._edits and "carried" in self.current.values:
            self._carried.on_gradients(self.parameters)
        self._unused.on_gradients()
        self._scaled_losses.by_id.clear()
        if self._has_others and num_collectives() != self._num_collectives:
            self.current.blind = COMMUNICATES
        if self.tape.grafted:
            self.current.values["grafted"] = True
            self.tape.grafted = False

    def on_gradients_changed(self) -> None:
        """Records the versions of the gradients. If they differ at the update, the loop has changed the gradients."""
        if self.is_light:
            return
        self._versions = versions_of_gradients(self.parameters)

    def _are_edited(self) -> bool:
        """Returns True if the loop has written to or replaced a gradient since the last recorded call."""
        return self._versions is not None and self._versions != versions_of_gradients(self.parameters)

    def on_zero_grad(self, owner: Optimizer | nn.Module) -> None:
        if self.is_light:
            return
        self._versions = None
        if self._unused.are_there and self._unused.on_zero_grad():
            self.current.values["used_by_hand"] = True
        if not isinstance(owner, Optimizer) and owner in self.roots:
            self._carried.on_zero_grad(None)
            self.current.program.append(ZeroGrad(None))
            self._happened("zero_grad", -1)
            return
        for index in self._cleared_by(owner):
            self._carried.on_zero_grad(index)
            self.current.program.append(ZeroGrad(index))
            self._happened("zero_grad", index)

    def _cleared_by(self, owner: Optimizer | nn.Module) -> list[int]:
        """Returns the numbers of the optimizers all of whose gradients ``owner.zero_grad()`` clears."""
        if isinstance(owner, Optimizer):
            return [self.optimizers.index(owner)] if owner in self.optimizers else []
        within = set(map(id, owner.parameters()))
        owned = [[id(p) for p in owned_by(each)] for each in self.optimizers]
        return [index for index, ids in enumerate(owned) if ids and within.issuperset(ids)]

    def on_unscale(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        if scaler.is_enabled() and optimizer in self.optimizers:
            scale = scaler._scale
            factor = None if scale is None else scale.detach().clone().double().reciprocal().float()
            self.current.program.append(Multiply(self._numbers_of(owned_by(optimizer)), factor))
            self._happened("unscale", self.optimizers.index(optimizer))

    def on_multiplied(self, factor: Tensor | float) -> None:
        self._versions = None  # the gradients are about to change
        self.current.program.append(Multiply(None, factor.detach().clone() if isinstance(factor, Tensor) else factor))
        self._happened("multiply", None)

    def on_clip(
        self, by: str, at: float, parameters: list[Tensor], norm: Tensor | None, function: TorchFunction | None = None
    ) -> None:
        if self.is_light:
            return
        self._versions = None
        self._is_clipped = True
        self.current.program.append(ClipGradients(by, at, self._clipped_by(parameters), function))
        found = None if norm is None else float(norm.detach()) if norm.is_cpu else norm.detach()
        self._happened("clip", {"by": by, "at": at, "norm": found, "parameters": len(parameters)})

    def _clipped_by(self, parameters: list[Tensor]) -> list[int]:
        if (clipped := list(map(id, parameters))) != self._clipped:  # else they are unchanged since the last clip
            self._clipped, self._clipped_numbers = clipped, self._numbers_of(parameters)
        return self._clipped_numbers

    def _norm_left_by_clip(self) -> float | None:
        """Returns the gradient norm after a clip by norm, if this was the last event and its norm is on the host."""
        if self._edits or self._versions is None:
            return None
        kind, clip = self.current.events[-1] if self.current.events else ("", {})
        if kind != "clip" or clip["by"] != "norm" or not isinstance(clip["norm"], float):
            return None
        norm = clip["norm"]
        return norm * min(1.0, float(clip["at"]) / (norm + 1e-6))  # torch clips by this factor

    def _numbers_of(self, parameters: Iterable[Tensor]) -> list[int]:
        """Returns the numbers of those of the parameters that are watched."""
        numbers = self._numbers
        return [numbers[id(p)] for p in parameters if id(p) in numbers]


def owned_by(optimizer: Optimizer) -> list[Tensor]:
    """Returns all parameters of all groups."""
    owned: list[Tensor] = []
    for group in optimizer.param_groups:
        owned += group["params"]
    return owned


def parameters_of(roots: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Returns the parameters of the roots, then those that only an optimizer has, without duplicates."""
    owned: list[Tensor] = [p for root in roots for p in root.parameters()]
    owned += [p for optimizer in optimizers for p in owned_by(optimizer)]
    return list({id(p): p for p in owned}.values())


def _copies_of_gradients(parameters: Sequence[Tensor]) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in parameters]


def _as_list(tensors: object) -> list[Tensor]:
    """Returns the tensors that torch.autograd.grad was called with: one, or a sequence."""
    if isinstance(tensors, Tensor):
        return [tensors]
    return list(tensors) if isinstance(tensors, Iterable) else []
