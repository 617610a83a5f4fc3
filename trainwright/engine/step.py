"""One optimizer step over all micro-batches of a global batch. The order below is the whole contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.rng import TorchGenerators
from trainwright.checkpoint.shards import is_sharded, locals_of
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.accumulate import Accumulated, accumulate, divided_before, run_divided
from trainwright.engine.evaluate import EvaluationResult
from trainwright.engine.exact import accumulate_exactly
from trainwright.engine.guard import APPLIED, must_skip
from trainwright.engine.loss import Loss, LossFn, as_loss_fn
from trainwright.engine.metrics import OutputKeeper
from trainwright.engine.over_ranks import (
    Counted,
    combine,
    count,
    fill_missing,
    of_all_ranks,
    seed_step,
    settle_parts,
    share_buffers,
)
from trainwright.engine.precision import FP32, Precision
from trainwright.engine.rank_layout import ALONE, RankLayout
from trainwright.engine.recover import Recovery
from trainwright.engine.sharded import ShardedPasses, without_retry
from trainwright.engine.spikes import NO_SPIKES, SpikeDecision, SpikeHandler
from trainwright.engine.update import Update, tell_torn
from trainwright.engine.witness import SILENT, StepWitness
from trainwright.errors import OomReport, UsageError
from trainwright.optim.clip import AdaptiveClip, ClipFn, global_norm, no_clip


@dataclass(repr=False)
class StepResult:
    """What one step did. Tensors are 0-d and on the device; nobody reads them unless due.

    ``step`` is the number of this step, 1-based: ``state.step`` after it. ``wait_s`` is how long the loop waited for
    the batch. ``skipped`` is true when the update was not applied. ``batch`` has the micro-batches that were trained
    on; ``oom_reports`` has one report for each try before that ran out of memory. ``spike`` is the decision of a
    SpikeGuard, None without a spike. ``evaluation`` is that of the validation set where one followed on the step.
    ``correction`` is the factor that made the sum of the gradients over micro-batches and ranks exact, None for 1.
    """

    step: int
    loss: Tensor
    grad_norm: Tensor
    lr: float
    weight: Tensor | float
    skipped: Tensor
    batch: StepBatch
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    probed: Mapping[str, Tensor] = field(default_factory=dict)
    wait_s: float = 0.0
    step_s: float = 0.0
    oom_reports: Sequence[OomReport] = ()
    spike: SpikeDecision | None = None
    evaluation: EvaluationResult | None = None
    correction: Tensor | float | None = None

    def __repr__(self) -> str:
        """One line for people. On a GPU it waits for the step."""
        figures: dict[str, Tensor | float] = {
            "loss": self.loss,
            "grad norm": self.grad_norm,
            "lr": self.lr,
            **self.metrics,
            **self.probed,
        }
        shown = ", ".join(f"{name} {float(value):.4g}" for name, value in figures.items())
        skipped = ", update skipped" if bool(self.skipped) else ""
        seen = f"; validation: {self.evaluation}" if self.evaluation else ""
        return f"step {self.step}: {shown}, {self.batch.size} samples, {self.step_s * 1e3:.3g} ms{skipped}{seen}"


StepFn = Callable[[TrainState, StepBatch], StepResult]
Probe = Callable[[TrainState], Mapping[str, Tensor]]
"""Reads the state inside the step: after backward and unscale, before clipping and the update."""
ScheduleFn = Callable[[int, float], float | None]
"""(completed steps, share of the run used) -> factor on every base learning rate; None: it has set the rates itself."""


def constant_lr(step: int, fraction: float) -> None:
    """The schedule that leaves the learning rates of the optimizer unchanged."""


def make_step(
    loss: Callable[..., Loss | Tensor],
    *,
    schedule: ScheduleFn = constant_lr,
    precision: Precision = FP32,
    clip: ClipFn = no_clip,
    probes: Sequence[Probe] = (),
    ranks: RankLayout = ALONE,
    seed: int = 0,
    spikes: SpikeHandler = NO_SPIKES,
    witness: StepWitness = SILENT,
    keeper: OutputKeeper | None = None,
) -> StepFn:
    """Makes the function that advances a TrainState by one optimizer step.

    ``loss`` is ``(model, batch)`` or ``(output, target)``, see ``as_loss_fn``. The base learning rate of each
    parameter group is its ``lr`` when the first step is taken (kept in ``initial_lr``, as torch's schedulers
    do).

    Of several ``ranks`` each has its part in the step; gradients, loss and metrics are those of the whole. Their random
    numbers in a step follow from ``seed``, step and rank.

    A step that runs out of memory begins again in smaller micro-batches, on all ranks; its samples and their weights
    stay the same. ``spikes`` is a ``SpikeGuard``, or by default does nothing. ``witness`` and ``keeper`` are internal:
    the recorder of a run, and what its metrics see.

    Raises UsageError for a part that is not made yet, such as ``clip=1.0``. The step raises OutOfMemoryError where
    nothing helps.
    """
    _require_made(schedule, precision, clip)
    own = loss if isinstance(loss, nn.Module) else None
    world, data, stream = ranks.sums, ranks.data or ranks.sums, ranks.stream
    sharded = ShardedPasses(world, ranks.zero, witness, ranks.norms)
    loss_fn = as_loss_fn(loss) if keeper is None else keeper.around(as_loss_fn(loss))
    parts = _Parts(loss_fn, precision, clip, probes, ranks, seed, sharded, witness, keeper)
    recovery = Recovery(lambda state: clear_grads(state.optimizer), world, witness)
    update = Update(recovery, witness)

    def advance(state: TrainState, batch: StepBatch) -> StepResult:
        device = device_of(state.optimizer)
        generators = TorchGenerators.read(device)
        witness.step_begins(state, batch, generators)
        if world.size > 1 or stream is not None or ranks.divided:
            seed_step(seed, state.step, world.rank if stream is None else stream)
            share_buffers(state, world)
            generators = TorchGenerators.read(device)
        lr = set_lr(state.optimizer, schedule(state.step, state.fraction))
        spikes.before_step(state)
        recovery.buffers.keep(state.model, own if state.loss is None else state.loss)
        counted = count(batch, batch.tokens, data)
        (done, grad_norm, probed), batch, reports = _gradients(state, batch, generators, parts, recovery)
        skipped = must_skip(grad_norm, done.weight)
        decision = spikes.decide(state, grad_norm, skipped)
        if decision is not None and decision.reason:
            skipped = torch.ones_like(skipped)
        scale = state.scaler.scale
        try:
            reports += update(skipped, state, batch)
            recovery.buffers.restore_if(skipped)
            if isinstance(clip, AdaptiveClip):
                clip.accept(skipped)
            state.scaler.update(grad_norm)
            state.ema.update(state.step + 1)
        except Exception as error:
            tell_torn(state, error)
            raise
        count_step(state, batch, counted)
        spikes.after_step(state, batch, done, grad_norm)
        reason = "" if decision is None else decision.reason
        if skipped is not APPLIED:
            losses, whole = (done.micro_losses, batch) if world.size == 1 else ((done.loss,), of_all_ranks(batch))
            state.ledger.note(
                state.step, skipped, grad_norm=grad_norm, losses=losses, batch=whole, scale=scale, reason=reason
            )
        result = StepResult(state.step, done.loss, grad_norm, lr, done.weight, skipped, batch, done.metrics, probed)
        result.oom_reports, result.spike = reports, decision
        result.correction = done.correction
        return result

    return advance


def count_step(state: TrainState, batch: StepBatch, counted: Counted) -> None:
    """Counts the step. ``counted`` is of the batch before any split: of a list of samples the first counts."""
    state.step += 1
    state.num_samples += counted.samples
    state.num_tokens += counted.tokens
    state.data = batch.cursor
    if batch.bad:
        state.quarantine.update(bad.id for bad in batch.bad)


class _Parts(NamedTuple):
    """What the gradients of a step are made with."""

    loss_fn: LossFn
    precision: Precision
    clip: ClipFn
    probes: Sequence[Probe]
    ranks: RankLayout
    seed: int
    sharded: ShardedPasses
    witness: StepWitness
    keeper: OutputKeeper | None


class _Gradients(NamedTuple):
    """The result of the passes of a step: the gradients are in ``.grad``, unscaled and clipped."""

    done: Accumulated
    grad_norm: Tensor
    probed: Mapping[str, Tensor]


def _gradients(
    state: TrainState, batch: StepBatch, generators: TorchGenerators, parts: _Parts, recovery: Recovery
) -> tuple[_Gradients, StepBatch, tuple[OomReport, ...]]:
    """The part of a step that can begin again: it changes nothing but gradients, buffers and generators.

    Of several ranks only up to where they exchange something: each must know first that all have come so far. So not
    at all where they divide the weights. Exact slices are never cut smaller.
    """
    ranks = parts.ranks
    if ranks.exact:
        done = accumulate_exactly(state, batch, parts.loss_fn, parts.precision, ranks.sums, seed=parts.seed)
        return _finish(state, done, parts), batch, ()
    if ranks.stages is not None or ranks.divided or ranks.norms.exchange or is_sharded(state.model):
        done = without_retry(lambda: _joint_passes(state, batch, parts), state, batch)
        return _finish(state, done, parts), batch, ()
    if ranks.sums.size == 1:
        return recovery(
            lambda state, batch: _finish(state, _passes(state, batch, parts), parts), state, batch, generators
        )
    done, batch, reports = recovery(lambda state, batch: _passes(state, batch, parts), state, batch, generators)
    return _finish(state, done, parts), batch, reports


def _passes(state: TrainState, batch: StepBatch, parts: _Parts) -> Accumulated:
    """The forward and backward passes over the data of this rank."""
    parts.witness.gradients_are_cleared(state.optimizer)
    clear_grads(state.optimizer)
    if parts.keeper is not None:
        parts.keeper.clear()
    return accumulate(state, batch, parts.loss_fn, parts.precision, parts.witness)


def _joint_passes(state: TrainState, batch: StepBatch, parts: _Parts) -> Accumulated:
    """Of ranks that compute together: gradients flow between them, so all divide by one number known beforehand.

    Those that share their samples know how many tokens these have, too: that keeps fp16 gradients in range.
    """
    parts.witness.gradients_are_cleared(state.optimizer)
    clear_grads(state.optimizer)
    number, loss_fn, precision, ranks = len(batch.global_ids), parts.loss_fn, parts.precision, parts.ranks
    if not (is_sharded(state.model) or ranks.norms.exchange):
        number *= max(1, batch.tokens // max(1, batch.size))
    if ranks.stages is not None:
        done = divided_before(ranks.stages.train(state, batch, loss_fn, precision, number), number)
        return combine(done, ranks.sums, device_of(state.optimizer)) if is_sharded(state.model) else done
    if is_sharded(state.model):
        return parts.sharded(state, batch, loss_fn, precision)
    step, witness, norms = state.step + 1, parts.witness, ranks.norms
    outputs = [
        run_divided(state, micro, loss_fn, precision, number, f"micro-batch {index} of step {step}", witness, norms)
        for index, micro in enumerate(batch.micro)
    ]
    return divided_before(outputs, number)


def _finish(state: TrainState, done: Accumulated, parts: _Parts) -> _Gradients:
    """The gradients as they will be applied, the same on every rank."""
    clip, ranks, witness = parts.clip, parts.ranks, parts.witness
    world = ranks.sums
    is_to_sum = world.size > 1 and not ranks.exact and not is_sharded(state.model)
    if ranks.divided:
        settle_parts(state.optimizer)
    if is_to_sum:
        fill_missing(state.optimizer, world)
        done = combine(done, world, device_of(state.optimizer))
    parameters, grads = collect_grads(state.optimizer, done)
    if grads and (state.scaler.scale is not None or done.correction is not None):
        _unscale(state, locals_of(grads), done, witness)
    if is_to_sum:
        ranks.sum_gradients(world, state, locals_of(grads), done.weight)
    probed = {name: value for probe in parts.probes for name, value in probe(state).items()}
    grad_norm = global_norm(grads) if grads else _zero_norm(state.optimizer)
    if ranks.stages is not None:
        grad_norm = ranks.stages.norm_of_all(grad_norm)
    if grads and clip is not no_clip:
        witness.gradients_are_clipped(clip, parameters, grad_norm)
        clip(parameters, grad_norm)
    return _Gradients(done, grad_norm, probed)


def _require_made(schedule: object, precision: object, clip: object) -> None:
    """``clip=1.0`` would otherwise fail inside the first step, after the first batch."""
    for name, part, fits, example in (
        ("schedule", schedule, callable(schedule), "make_schedule('cosine', total=1000), or any f(step, fraction)"),
        ("precision", precision, isinstance(precision, Precision), "Precision('bf16', 'cuda')"),
        ("clip", clip, callable(clip), "make_clip('norm', 1.0)"),
    ):
        if not fits:
            raise UsageError(f"make_step: {name} is {part!r}, which is not made yet", remedy=f"give {example}")


def set_lr(optimizer: Optimizer, factor: float | None) -> float:
    """Sets every group to its base learning rate times ``factor``, if there is one; returns the first group's."""
    groups = optimizer.param_groups
    for group in groups if factor is not None else ():
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
    return float(groups[0]["lr"])


def clear_grads(optimizer: Optimizer) -> None:
    """Drops the gradients of the last step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _unscale(state: TrainState, grads: list[Tensor], done: Accumulated, witness: StepWitness) -> None:
    """Divides by the loss scale, and makes the sum over micro-batches exact, see ``accumulate``."""
    if state.scaler.scale is not None:
        witness.gradients_are_multiplied(state.scaler.scale.reciprocal())
        state.scaler.unscale_(grads)
    if done.correction is not None:
        witness.gradients_are_multiplied(done.correction)
        torch._foreach_mul_(grads, done.correction)


def device_of(optimizer: Optimizer) -> torch.device:
    """The device of the parameters."""
    device: torch.device = optimizer.param_groups[0]["params"][0].device
    return device


def _zero_norm(optimizer: Optimizer) -> Tensor:
    """The norm where there are no gradients."""
    return torch.zeros((), device=device_of(optimizer))


def collect_grads(optimizer: Optimizer, done: Accumulated) -> tuple[list[Tensor], list[Tensor]]:
    """The optimizer's parameters that have a gradient, and the gradients.

    Raises UsageError when there is none though something was counted: nothing would be trained. And for sparse
    gradients, which have no norm in torch.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    grads = [grad for p in parameters if (grad := p.grad) is not None]
    if len(grads) < len(parameters):
        parameters = [p for p in parameters if p.grad is not None]
    if not parameters and done.weight != 0:  # a host sync on a GPU, only here
        raise UsageError(
            "no parameter of the optimizer got a gradient: the loss does not depend on any of them",
            remedy="look for .detach(), .item(), torch.tensor(loss) or no_grad between the model and the "
            "loss, and check that the optimizer was built from this model's parameters",
        )
    if True in [grad.is_sparse for grad in grads]:
        raise UsageError(
            "a parameter has a sparse gradient: it comes from nn.Embedding(..., sparse=True) or the like",
            remedy="leave sparse=True out: a dense gradient can be clipped and guarded",
        )
    return parameters, grads
