"""Records the program of every step of a running loop without changing anything."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from trainwright.checkpoint.reach import ReachableState
from trainwright.recorder.fetched import FetchedBatches
from trainwright.recorder.gradients import GradientRecorder, owned_by
from trainwright.recorder.listener import inside
from trainwright.recorder.live_sums import sums_of
from trainwright.recorder.program import Call, OptimizerStep, RecordedStep, others_in
from trainwright.recorder.ranks import num_collectives
from trainwright.recorder.tape import autocast_now
from trainwright.recorder.user_types import Args, Kwargs

LONGEST = 4096
"""Maximum number of calls, operations, events, ... per step."""


_TRAINING, _REQUIRES_GRAD = operator.attrgetter("training"), operator.attrgetter("requires_grad")


class CallState:
    """Reads the state that a forward call depends on besides its arguments: modes, ``requires_grad``, random state.

    Equal values of consecutive calls are one object.
    """

    def __init__(self, modules: Sequence[nn.Module], parameters: Sequence[Tensor], device: torch.device) -> None:
        self.modules, self._parameters, self._device = modules, parameters, device
        self._last_modes: tuple[bool, ...] = ()
        self._last_wanted: tuple[bool, ...] = ()
        self._last_rng, self._step = torch.empty(0, device="cpu"), -1

    def modes_and_wanted(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """Returns ``training`` of every module, and ``requires_grad`` of every parameter."""
        modes, wanted = tuple(map(_TRAINING, self.modules)), tuple(map(_REQUIRES_GRAD, self._parameters))
        if modes != self._last_modes:
            self._last_modes = modes
        if wanted != self._last_wanted:
            self._last_wanted = wanted
        return self._last_modes, self._last_wanted

    def rng(self, step: int) -> tuple[Tensor, Tensor | None]:
        """Returns the states of the default CPU generator and of the GPU generator (None without a GPU).

        The first call of a step skips the comparison with the last state, which takes longer than reading the state.
        """
        now = torch.default_generator.get_state()
        if step != self._step or not torch.equal(now, self._last_rng):
            self._last_rng, self._step = now, step
        return self._last_rng, torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None


class LoopRecorder(GradientRecorder):
    """Makes one RecordedStep of each optimizer step. ``closed`` is called with each finished step.

    The third argument of ``before_update`` is the gradient norm after clipping; None unless a clip right before the
    update measured the norm.

    A step of several alternating optimizers (a GAN) ends when each of them has stepped. With ``closes_itself=False`` a
    step ends when ``close`` is called, as the engine does.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        closed: Callable[[RecordedStep], None],
        *,
        before_update: Callable[[RecordedStep, Optimizer, float | None], None],
        after_update: Callable[[RecordedStep, Optimizer], None],
        first_step: int = 1,
        closes_itself: bool = True,
    ) -> None:
        super().__init__(roots, optimizers, first_step)
        self._closes_itself = closes_itself
        self._closed, self._before_update, self._after_update = closed, before_update, after_update
        self.budget_bytes = math.inf  # maximum bytes of one step
        self._root_of = {id(m): number for number, root in enumerate(roots) for m in root.modules()}
        self._paths = {id(m): path for root in roots for path, m in root.named_modules()}
        self._paths |= {id(root): "" for root in roots}
        self._root_of |= {id(root): number for number, root in enumerate(roots)}
        modules = list({id(m): m for root in roots for m in root.modules()}.values())
        self._state, self._kind = CallState(modules, self.parameters, self.device), self.device.type
        self._fetched = FetchedBatches()
        self._call: Call | None = None
        self._begin_step(first_step)
        self._stepped: set[int] = set()
        self._was_taping = False  # the tape was running when an unwatched optimizer began its update
        self._last_lines: list[list[str]] | None = None
        self._ended_s = time.perf_counter()

    # forward calls

    def on_batch(self, iterator: object, ids: object, batch: object, wait_s: float) -> None:
        if self._closes_itself:  # else the engine knows the ids of each batch
            self._fetched.add(ids, batch, wait_s)

    def on_forward(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        grad = torch.is_grad_enabled()
        index = self._root_of.get(id(root))
        if index is None:  # added to the model later: its operations are recorded like those of the loop
            return
        self._happened("forward", (index, root.training, grad))
        if not grad:
            return
        if self.tape.pushed:  # operations inside the model are not recorded, and torch.compile would trace the tape
            self.tape.stop()
        if self._unused.reads.pushed:
            self._unused.reads.stop()
        step, state = self.current, self._state
        if len(step.events) > LONGEST or len(step.program) > LONGEST or self.tape.num_bytes > self.budget_bytes:
            self._shorten()
        if self._fetched.batches:
            step.ids.append(self._fetched.take((args, kwargs)))
        if self._has_others and not step.calls:
            self._num_collectives = num_collectives()
        written, rng = (self.tape.write(args), self.tape.write(kwargs) if kwargs else {}), state.rng(step.step)
        modes, wanted = state.modes_and_wanted()
        self._call = call = Call(index, *written, rng, modes, autocast_now(self._kind), wanted=wanted)
        call.part, call.batch, call.held = self._paths[id(root)], len(step.ids) - 1, self._held_by(args, kwargs)
        if self.tape.operations:
            step.program += self.tape.operations
            self.tape.operations = []
        step.program.append(call)

    def _held_by(self, args: Args, kwargs: Kwargs) -> ReachableState | None:
        """Returns the state of arguments that are neither tensors nor plain values, before the call."""
        if not kwargs and all(isinstance(each, Tensor) for each in args):
            return None
        others = others_in((args, kwargs))
        if not others:
            return None
        return ReachableState(others, [*self._state.modules, *self.parameters], is_brief=True, copies=False)

    def _shorten(self) -> None:
        """Bounds the memory of a loop that calls the model repeatedly without an update."""
        step = self.current
        if len(step.events) > LONGEST:
            del step.events[: LONGEST // 2]
        is_long = len(step.program) > LONGEST
        if is_long or self.tape.num_bytes > self.budget_bytes:
            step.program.clear()
            step.losses.clear()
            step.grad_losses.clear()
            step.ids.clear()
            self.tape.forget()
            self.tape.num_bytes = 0
            limit = (
                f"has more than {LONGEST:,} operations" if is_long else "needs more memory than the recorder may use"
            )
            step.blind = f"a step {limit}"

    def on_output(self, root: nn.Module, output: object) -> None:
        if self._call is None:
            return
        if output is None:
            self.current.blind = "a forward pass raised, or returned nothing"
        self._call.outputs = self.tape.outputs(output)
        self._call = None
        self.tape.start()

    # updates

    def set_light(self, is_light: bool) -> None:
        """Sets whether steps are recorded by loss and update only, from the step that begins now."""
        self.is_light = is_light
        self.tape.stop()
        self._begin_step(self.current.step)

    def on_step(self, optimizer: Optimizer, args: Args) -> None:
        if self.is_light:
            self._record_light(optimizer)
            return
        if optimizer not in self.optimizers:
            self._happened("other_step", len(self._numbers_of(owned_by(optimizer))))
            self._was_taping = self.tape.pushed
            self.tape.stop()  # the update of another loop is not recorded
            return
        index = self.optimizers.index(optimizer)
        self._edits = self._edits or self._are_edited()
        if self._edits:  # once detected, all later steps count as edited
            self.current.values["edited"] = True
        has_backward = self._has_backward()
        may_differ = self._carried.left or not has_backward
        if may_differ and self._carried.is_recomputed(index, owned_by(optimizer), has_backward):
            self.current.values.setdefault("made_anew", []).append(index)
        norm = self._norm_left_by_clip()
        groups = [hyperparameters(group) for group in optimizer.param_groups]
        step = OptimizerStep(index, groups, getattr(optimizer, "grad_scale", None))
        self.current.lr = float(groups[0].get("lr", 0.0)) if index == 0 else self.current.lr
        self._happened("step", {"optimizer": index, "autocast": torch.is_autocast_enabled(self._kind)})
        if inside.backward:
            self.current.blind = "the optimizer steps inside of backward"
        if self._is_careful:
            step.weights, step.gradients = sums_of(self.parameters), sums_of([p.grad for p in self.parameters])
        self._before_update(self.current, optimizer, norm)
        self.current.program.append(step)

    def _record_light(self, optimizer: Optimizer) -> None:
        if optimizer in self.optimizers:
            index = self.optimizers.index(optimizer)
            update = OptimizerStep(index, [hyperparameters(group) for group in optimizer.param_groups])
            self.current.lr = float(update.groups[0].get("lr", 0.0)) if index == 0 else self.current.lr
            self._before_update(self.current, optimizer, None)
            self.current.program.append(update)
        elif len(self.current.events) < LONGEST:
            self.current.events.append(("other_step", len(self._numbers_of(owned_by(optimizer)))))

    def on_closure_again(self, optimizer: Optimizer) -> None:
        if optimizer in self.optimizers:
            self.current.blind = "the optimizer calls its closure several times in a step"

    def on_stepped(self, optimizer: Optimizer) -> None:
        if optimizer in self.optimizers:
            self._after_update(self.current, optimizer)
            if self._is_careful and self.current.program and not self.is_light:
                last = self.current.program[-1]
                if isinstance(last, OptimizerStep):
                    last.left = sums_of(self.parameters)
            self._one_stepped(optimizer)
        elif self._was_taping:
            self._was_taping = False
            self.tape.start()

    def on_scaler_step(self, scaler: GradScaler, optimizer: Optimizer, stepped: bool) -> None:
        if optimizer in self.optimizers and not stepped:
            self._happened("scaler_skipped", self.optimizers.index(optimizer))
            self._before_update(self.current, optimizer, None)
            self._one_stepped(optimizer)

    def on_scaler_update(self, scaler: GradScaler) -> None:
        self._happened("scaler_update", float(scaler.get_scale()) if self.device.type == "cpu" else None)

    def _one_stepped(self, optimizer: Optimizer) -> None:
        index = self.optimizers.index(optimizer)
        self._unused.forget()
        again = index in self._stepped
        self._stepped.add(index)
        if not self._closes_itself:
            self.current.blind = "it makes several updates of one optimizer" if again else self.current.blind
        elif again or len(self._stepped) == len(self.optimizers):
            self.close()

    def on_schedule(self, scheduler: object) -> None:
        if self.is_light:
            return
        self._happened("schedule", type(scheduler).__name__)

    # end of a step

    def _begin_step(self, number: int) -> None:
        self.current = RecordedStep(number, is_light=self.is_light)

    def close(self) -> None:
        """Ends the step. Later events belong to the next one."""
        done, now_s = self.current, time.perf_counter()
        if self.tape.pushed:
            self.tape.stop()
        if self.tape.lines:
            called = [[f"op:{name}", line] for name, line in self.tape.lines]
            done.values["lines"] = [*done.values.get("lines", ()), *called]
        done.losses = done.losses or done.grad_losses
        self.tape.forget()
        self._stepped.clear()
        self._scaled_losses.by_id.clear()
        self._carried.close()
        self.depth, self._call, self._versions = 0, None, None
        if self._unused.are_there:
            self._unused.forget()
        self._was_clipped, self._is_clipped = self._is_clipped, False
        done.ended_s = time.time()
        done.num_bytes, self.tape.num_bytes = self.tape.num_bytes, 0
        done.values["step_s"], done.values["wait_s"] = now_s - self._ended_s, self._fetched.waited_s
        if (lines := done.values.get("lines")) is not None:
            if lines == self._last_lines:  # the log has these line numbers already
                del done.values["lines"]
            self._last_lines = lines
        self._begin_step(done.step + 1)
        self._closed(done)
        self._ended_s, self._fetched.waited_s = time.perf_counter(), 0.0

    def close_deferred(self, done: RecordedStep) -> None:
        """Ends a deferred step: ``done`` holds its inputs, and no events were recorded."""
        now_s = time.perf_counter()
        done.ended_s = time.time()
        done.values["step_s"], done.values["wait_s"] = now_s - self._ended_s, 0.0
        self._begin_step(done.step + 1)
        self._closed(done)
        self._ended_s = time.perf_counter()

    def on_begun_again(self) -> None:
        self.tape.stop()
        self.tape.forget()
        self.tape.num_bytes, self.tape.failed = 0, None
        self._scaled_losses.by_id.clear()
        self.depth, self._call = 0, None
        self._begin_step(self.current.step)

    def on_forked(self) -> None:
        self.stop_modes()
        self.tape.forget()

    def fail(self, error: Exception) -> None:
        super().fail(error)
        self.stop_modes()
        self.tape.forget()


def hyperparameters(group: Kwargs) -> Kwargs:
    """Returns a copy of a parameter group. Its learning rate may be a tensor that the scheduler writes to."""
    copy = {**group, "params": None}
    if isinstance(copy.get("lr"), Tensor):
        copy["lr"] = copy["lr"].detach().clone()
    return copy
