"""Manual optimization: a step function of the user calls backward and the optimizers; the engine does the rest."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from trainwright.checkpoint.chained_optimizer import parts_of
from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.rng import TorchGenerators
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.guard import APPLIED, SKIPPED, BufferGuard
from trainwright.engine.loss import Loss, validated_output
from trainwright.engine.metrics import OutputKeeper
from trainwright.engine.rank_sums import Counted, of_all_ranks
from trainwright.engine.step import (
    ScheduleFn,
    StepFn,
    StepResult,
    clear_grads,
    constant_lr,
    count_step,
    raise_if_torn,
    set_lr,
)
from trainwright.engine.witness import SILENT, StepWitness
from trainwright.errors import UsageError
from trainwright.optim.clip import norm_on_host

OwnStep = Callable[[TrainState, StepBatch], Loss | Tensor]
"""``step(state, batch)``: any number of backward passes and updates.

Returns the loss that is logged: a mean, or a ``Loss`` whose metrics are logged too.
"""


def make_own_step(
    step: OwnStep,
    *,
    schedule: ScheduleFn = constant_lr,
    witness: StepWitness = SILENT,
    keeper: OutputKeeper | None = None,
) -> StepFn:
    """Make the function that advances a TrainState by one call of ``step``.

    Each call starts without gradients, at the learning rate of ``schedule``. Each call of an optimizer of the state is
    one update. An update whose gradients are not finite is skipped, and the buffers of that step are restored. On a GPU
    the check costs one host sync. If an optimizer computes gradients itself (a closure, as LBFGS), weights and state
    are copied before the update and restored if needed.

    The gradient norm of the step combines the gradients of all its updates. A step that runs out of memory is not
    retried.

    Args:
        step: Runs backward passes and updates, and returns the loss that is logged.
        schedule: See ``make_schedule``.
        witness: Internal: the recorder of a run.
        keeper: Internal: collects outputs for metrics.

    Raises:
        UsageError: ``step`` is not callable, or returns no loss.
    """
    if not callable(step):
        raise UsageError(f"the step is a {type(step).__name__}", remedy="give a function step(state, batch)")
    if keeper is not None:
        step = keeper.around(step)  # type: ignore[arg-type, assignment]  # it gets the state, not the model
    buffers, updates = BufferGuard(), UpdateGuard()

    def advance(state: TrainState, batch: StepBatch) -> StepResult:
        if witness is not SILENT:
            witness.step_begins(state, batch, TorchGenerators.read(state.device))
        lr = set_lr(state.optimizer, schedule(state.step, state.fraction))
        buffers.keep(state.model, state.loss)
        witness.gradients_are_cleared(state.optimizer)
        clear_grads(state.optimizer)
        try:
            with updates.of(parts_of(state.optimizer)):
                output = step(state, batch)
            loss, weight, metrics = _read(output, batch, state.step + 1)
            buffers.restore_if(updates.skipped)
            state.ema.update(state.step + 1)
        except Exception as error:
            raise_if_torn(state, error)
            raise
        count_step(state, batch, Counted(batch.size, batch.tokens))
        norm = updates.norm()
        if updates.skipped is not APPLIED:
            state.ledger.note(
                state.step,
                updates.skipped,
                grad_norm=norm,
                losses=(loss,),
                batch=of_all_ranks(batch),
                scale=None,
                reason="",
            )
        return StepResult(state.step, loss, norm, lr, weight, updates.skipped, batch, metrics)

    weakref.finalize(advance, updates.close)
    return advance


def _read(output: object, batch: StepBatch, step: int) -> tuple[Tensor, Tensor | float, dict[str, Tensor]]:
    known = validated_output(output, f"step {step}: the step function gave")
    if isinstance(known, Tensor):
        return known.detach(), float(batch.size), {}
    metrics = {name: value.detach() / known.weight for name, value in known.metrics.items()}
    return known.total.detach() / known.weight, known.weight, metrics


class UpdateGuard:
    """Checks the gradients of each update inside its context; an optimizer with non-finite gradients changes nothing.

    The hooks stay registered from the first step until ``close``, because registering them takes longer than running
    them. ``skipped`` is true once an update of the step was skipped.
    """

    def __init__(self) -> None:
        self._optimizers: Sequence[Optimizer] = ()
        self._handles: list[RemovableHandle] = []
        self._is_open = False
        self._like: tuple[Tensor | None, torch.dtype] = None, torch.float32  # first parameter, and dtype of its norm
        self._begin()

    def _begin(self) -> None:
        self._stepping: Optimizer | None = None
        self._hidden: list[tuple[Tensor, Tensor | None]] = []
        self._norms: list[float] = []
        self._before_closure: _StateBeforeUpdate | None = None
        self.skipped = APPLIED

    @contextmanager
    def of(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Context of a step that may update with these optimizers. A step of any other raises UsageError."""
        self._optimizers = optimizers
        if not self._handles:
            self._handles = [
                register_optimizer_step_pre_hook(self._before),
                register_optimizer_step_post_hook(self._after),
            ]
        self._begin()
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: Optimizer, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        if not self._is_open or self._stepping is not None:  # not a step of this run, or an optimizer nested in another
            return
        if optimizer not in self._optimizers:
            raise UsageError(
                f"the step calls {type(optimizer).__name__}.step() of an optimizer outside the run: its state would "
                "not be saved",
                remedy="give it: tw.fit(..., optimizer=it), or optimizer=[one, other] for several",
            )
        self._stepping = optimizer
        # the first argument is the optimizer
        if (len(args) > 1 or kwargs) and any(map(callable, (*args, *kwargs.values()))):
            self._before_closure = _StateBeforeUpdate(optimizer)
        elif not self._are_finite(optimizer):
            self._hidden = [(p, p.grad) for p in _parameters(optimizer)]
            for p, _ in self._hidden:
                p.grad = None

    def _after(self, optimizer: Optimizer, _args: Sequence[object], _kwargs: Mapping[str, object]) -> None:
        if optimizer is not self._stepping or not self._is_open:
            return
        self._stepping = None
        for p, grad in self._hidden:
            p.grad = grad
        self._hidden = []
        if self._before_closure is not None and not self._are_finite(optimizer):
            self._before_closure.put_back()
        self._before_closure = None

    def _are_finite(self, optimizer: Optimizer) -> bool:
        """Return True if the gradients of ``optimizer`` are finite; append their norm to the norms of the step."""
        groups = optimizer.param_groups
        grads = [grad for group in groups for p in group["params"] if (grad := p.grad) is not None]
        if not grads:
            return True
        self._norms.append(norm := norm_on_host(grads))
        if math.isfinite(norm):
            return True
        self.skipped = SKIPPED
        return False

    def norm(self) -> Tensor:
        """Return the norm of the gradients of all updates; 0 if there was none."""
        parameter: Tensor = self._optimizers[0].param_groups[0]["params"][0]
        if parameter is not self._like[0]:
            self._like = parameter, torch.promote_types(parameter.dtype, torch.float32).to_real()
        return torch.scalar_tensor(math.hypot(*self._norms), dtype=self._like[1], device=parameter.device)


class _StateBeforeUpdate:
    """Copy of weights and state of an optimizer, made before an update whose gradients are not known yet."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._weights = [p.detach().clone() for p in _parameters(optimizer)]
        self._state = copy.deepcopy(optimizer.state_dict())

    @torch.no_grad()
    def put_back(self) -> None:
        for p, weight in zip(_parameters(self._optimizer), self._weights, strict=True):
            p.copy_(weight)
        self._optimizer.load_state_dict(self._state)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
