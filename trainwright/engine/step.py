"""One optimizer step over all micro-batches of a global batch. Replays rely on the order of the operations below."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.chained_optimizer import parts_of
from trainwright.checkpoint.codec import StateDict
from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.rng import TorchGenerators
from trainwright.checkpoint.shards import is_sharded, locals_of
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.group import SOLO, Ranks, World
from trainwright.engine.evaluate import EvaluationResult
from trainwright.engine.exact import accumulate_exactly
from trainwright.engine.graphs import StepGraphs, StepOutputs
from trainwright.engine.guard import APPLIED, BufferGuard, must_skip, update_unless
from trainwright.engine.loss import Accumulated, Loss, LossFn, accumulate, as_loss_fn, combine_divided, run_divided
from trainwright.engine.metrics import OutputKeeper
from trainwright.engine.overlap import OtherRankFailed, OverlappedSum
from trainwright.engine.precision import FP32, Precision
from trainwright.engine.rank_layout import ONE_RANK_LAYOUT, RankLayout
from trainwright.engine.rank_sums import (
    Counted,
    combine,
    count,
    fill_missing,
    of_all_ranks,
    seed_step,
    settle_parts,
    share_buffers,
    sum_counts,
    sum_grads,
)
from trainwright.engine.recover import Recovery, is_out_of_memory, make_room, oom_snapshot
from trainwright.engine.sharded import ShardedPasses, without_retry
from trainwright.engine.spikes import NO_SPIKES, SpikeDecision, SpikeHandler
from trainwright.engine.witness import SILENT, StepWitness
from trainwright.errors import OomReport, OutOfMemoryError, UsageError
from trainwright.optim.clip import ClipFn, ModelOrder, global_norm, no_clip


@dataclass(repr=False)
class StepResult:
    """Result of one step. Tensors are 0-d and on the training device; they are synchronized only if a value is logged.

    Attributes:
        step: Number of this step, from 1: ``state.step`` after it.
        loss: Mean loss of the global batch.
        grad_norm: Norm of the gradients before clipping.
        lr: Learning rate of the first parameter group.
        weight: Number of counted items.
        skipped: True if the update was not applied.
        batch: The micro-batches, smaller than planned if the step ran out of memory before.
        metrics: Means by name.
        probed: Values that the probes returned, by name.
        wait_s: Seconds that the loop waited for the batch.
        step_s: Seconds for the step, including ``wait_s``.
        oom_reports: One report for each attempt that ran out of memory.
        spike: Decision of a SpikeGuard; None without a spike.
        evaluation: Result of the evaluation after this step, if there was one.
        correction: Factor that made the gradient sum over micro-batches and ranks exact; None for 1.
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
        """Return one line for people. On a GPU, this waits for the end of the step."""
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
"""(completed steps, completed fraction of the run) -> factor on every base learning rate. A function that sets the
learning rates itself returns None."""


def constant_lr(step: int, fraction: float) -> None:
    """Leave the learning rates of the optimizer unchanged."""


def make_step(
    loss: Callable[..., Loss | Tensor],
    *,
    schedule: ScheduleFn = constant_lr,
    precision: Precision = FP32,
    clip: ClipFn = no_clip,
    probes: Sequence[Probe] = (),
    ranks: RankLayout = ONE_RANK_LAYOUT,
    seed: int = 0,
    spikes: SpikeHandler = NO_SPIKES,
    witness: StepWitness = SILENT,
    keeper: OutputKeeper | None = None,
    graphs: StepGraphs | None = None,
) -> StepFn:
    """Make the function that advances a TrainState by one optimizer step.

    The base learning rate of each parameter group is its ``lr`` at the first step (stored in ``initial_lr``, as torch's
    schedulers do). A step that runs out of memory starts again in smaller micro-batches, on all ranks; its samples and
    their weights stay the same.

    Args:
        loss: ``(model, batch)`` or ``(output, target)``, see ``as_loss_fn``.
        schedule: See ``make_schedule``.
        precision: See ``Precision``.
        clip: See ``make_clip``.
        probes: Read the state before clipping; the values they return are in ``StepResult.probed``.
        ranks: How ranks divide the step. Gradients, loss and metrics are computed over the global batch.
        seed: With step and rank, determines the random numbers of each rank.
        spikes: A ``SpikeGuard``; does nothing by default.
        witness: Internal: the recorder of a run.
        keeper: Internal: collects outputs for metrics.
        graphs: Captures steps and replays them, on one GPU. Steps that cannot be captured run eagerly.

    Returns:
        A function of ``(state, batch)`` that returns a StepResult. It raises OutOfMemoryError if smaller micro-batches
        do not help.

    Raises:
        UsageError: ``schedule``, ``precision`` or ``clip`` is a setting such as ``1.0`` instead of an object.
    """
    _require_made(schedule, precision, clip)
    own = loss if isinstance(loss, nn.Module) else None
    world = ranks.sums
    data = ranks.data or ranks.sums
    stream = ranks.stream
    sharded = ShardedPasses(world, ranks.zero, witness, ranks.norms)
    loss_fn = as_loss_fn(loss) if keeper is None else keeper.around(as_loss_fn(loss))
    overlap = OverlappedSum(world) if isinstance(world, Ranks) else None
    parts = _Parts(loss_fn, precision, clip, probes, ranks, seed, sharded, witness, keeper, overlap, ModelOrder())
    recovery = Recovery(lambda state: clear_grads(state.optimizer), world, witness)
    update = Update(recovery, witness)
    work = _DeviceWork(parts, own)
    if graphs is not None and (obstacle := _obstacle_to_graphs(ranks, spikes, keeper)):
        graphs.end(obstacle)
    if world.size == 1 and not (ranks.exact or ranks.divided or ranks.stages):
        alone = as_loss_fn(loss)  # without the keeper, which would collect the outputs twice
        witness.can_repeat(lambda state, batch: accumulate(state, batch, alone, precision))

    def advance(state: TrainState, batch: StepBatch) -> StepResult:
        generators = TorchGenerators.read(state.device)
        witness.step_begins(state, batch, generators)
        if world.size > 1 or stream is not None or ranks.divided:
            seed_step(seed, state.step, world.rank if stream is None else stream)
            share_buffers(state, world)
            generators = TorchGenerators.read(state.device)
        lr = set_lr(state.optimizer, schedule(state.step, state.fraction))
        if graphs is not None and not witness.is_listening:
            outputs = graphs.step(state, batch, work)
            if outputs is not None:
                count_step(state, batch, Counted(batch.size, batch.tokens))
                return _result(state, batch, outputs, lr)
        spikes.before_step(state)
        recovery.buffers.keep(state.model, own if state.loss is None else state.loss)
        counted = Counted(batch.size, batch.tokens) if data.size == 1 else count(batch, data)
        (done, grad_norm, probed), batch, reports = _gradients(state, batch, generators, parts, recovery)
        if world.size > 1:
            sum_counts(state, world)
        skipped = must_skip(grad_norm, done.weight)
        decision = spikes.decide(state, grad_norm, skipped)
        if decision is not None and decision.reason:
            skipped = torch.ones_like(skipped)
        scale = state.scaler.scale
        try:
            reports += update(skipped, state, batch)
            recovery.buffers.restore_if(skipped)
            state.scaler.update(grad_norm)
            state.ema.update(state.step + 1)
        except Exception as error:
            raise_if_torn(state, error)
            raise
        count_step(state, batch, counted)
        spikes.after_step(state, batch, done, grad_norm)
        result = _result(state, batch, StepOutputs(done, grad_norm, skipped), lr, scale, decision, world)
        result.probed, result.oom_reports = probed, reports
        return result

    return advance


def _result(
    state: TrainState,
    batch: StepBatch,
    outputs: StepOutputs,
    lr: float,
    scale: Tensor | None = None,
    decision: SpikeDecision | None = None,
    world: World = SOLO,
) -> StepResult:
    """Return the result of a counted step, and note it in the ledger if its update may have been skipped."""
    done, grad_norm, skipped = outputs
    if skipped is not APPLIED:
        losses, whole = (done.micro_losses, batch) if world.size == 1 else ((done.loss,), of_all_ranks(batch))
        reason = "" if decision is None else decision.reason
        state.ledger.note(
            state.step, skipped, grad_norm=grad_norm, losses=losses, batch=whole, scale=scale, reason=reason
        )
    result = StepResult(state.step, done.loss, grad_norm, lr, done.weight, skipped, batch, done.metrics)
    result.spike, result.correction = decision, done.correction
    return result


def _obstacle_to_graphs(ranks: RankLayout, spikes: SpikeHandler, keeper: object) -> str:
    if ranks is not ONE_RANK_LAYOUT and (ranks.sums.size > 1 or ranks.exact or ranks.divided or ranks.stages):
        return "several ranks train together, or gradients are added exactly"
    if spikes is not NO_SPIKES:
        return "a spike policy reads the gradient norm before each update; use spikes.policy: warn or off"
    return "" if keeper is None else "metrics over training batches collect outputs; leave them to the validation"


class _DeviceWork:
    """The part of a step that a graph captures, see ``StepWork``."""

    def __init__(self, parts: _Parts, loss: nn.Module | None) -> None:
        self._parts = parts._replace(witness=SILENT, probes=())
        self._loss, self._buffers = loss, BufferGuard()

    def gradients(self, state: TrainState, batch: StepBatch) -> tuple[Accumulated, Tensor]:
        self._buffers.keep(state.model, self._loss if state.loss is None else state.loss)
        done = _passes(state, batch, self._parts)
        finished = _finish(state, done, self._parts)
        return finished.done, finished.grad_norm

    def update(self, state: TrainState, done: Accumulated, grad_norm: Tensor) -> Tensor:
        skipped = must_skip(grad_norm, done.weight)
        update_unless(skipped, state.optimizer)
        self._buffers.restore_if(skipped)
        return skipped

    def undo(self, state: TrainState, *, has_run: bool) -> None:
        clear_grads(state.optimizer)
        if has_run:
            self._buffers.put_back()


def count_step(state: TrainState, batch: StepBatch, counted: Counted) -> None:
    """Add one step to the counters of the state.

    ``counted`` must come from the batch before a retry splits it, because for a list of samples, the token count
    depends on how the samples are divided into micro-batches.
    """
    state.step += 1
    state.num_samples += counted.samples
    state.num_tokens += counted.tokens
    state.data = batch.cursor
    if batch.bad:
        state.quarantine.update(bad.id for bad in batch.bad)


class _Parts(NamedTuple):
    """Components that compute the gradients of a step."""

    loss_fn: LossFn
    precision: Precision
    clip: ClipFn
    probes: Sequence[Probe]
    ranks: RankLayout
    seed: int
    sharded: ShardedPasses
    witness: StepWitness
    keeper: OutputKeeper | None
    overlap: OverlappedSum | None
    model_order: ModelOrder


class _Gradients(NamedTuple):
    """Result of the passes of a step. The gradients are in ``.grad``, unscaled and clipped."""

    done: Accumulated
    grad_norm: Tensor
    probed: Mapping[str, Tensor]


def _gradients(
    state: TrainState, batch: StepBatch, generators: TorchGenerators, parts: _Parts, recovery: Recovery
) -> tuple[_Gradients, StepBatch, tuple[OomReport, ...]]:
    """Run the part of a step that can start again, because it changes only gradients, buffers and generators.

    On several ranks, all of them retry if one has run out of memory. Ranks that divide the weights cannot retry. With
    ``parallel.exact``, the size of the slices is fixed, so a retry could not make them smaller.
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
    overlap = parts.overlap
    if overlap is not None and overlap.is_enabled:
        summed, pieces, reports = recovery(
            lambda state, batch: _overlapped_passes(state, batch, parts, overlap), state, batch, generators
        )
        if overlap.settle():
            assert summed is not None, "the ranks agreed that all have computed their part"
            return _finish(state, summed, parts, is_summed=True), pieces, reports
        recovery.put_back(state)
    done, batch, reports = recovery(lambda state, batch: _passes(state, batch, parts), state, batch, generators)
    return _finish(state, done, parts), batch, reports


def _overlapped_passes(
    state: TrainState, batch: StepBatch, parts: _Parts, overlap: OverlappedSum
) -> Accumulated | None:
    """Sum the gradients over ranks during the last backward pass. Returns None if another rank ran out of memory."""
    try:
        with overlap.attempt():
            return _passes(state, batch, parts, lambda done: overlap.last_backward(state, done, state.device))
    except OtherRankFailed:
        return None


def _passes(
    state: TrainState,
    batch: StepBatch,
    parts: _Parts,
    last_backward: Callable[[Accumulated], AbstractContextManager[Accumulated]] = nullcontext,
) -> Accumulated:
    parts.witness.gradients_are_cleared(state.optimizer)
    clear_grads(state.optimizer)
    if parts.keeper is not None:
        parts.keeper.clear()
    return accumulate(state, batch, parts.loss_fn, parts.precision, parts.witness, last_backward)


def _joint_passes(state: TrainState, batch: StepBatch, parts: _Parts) -> Accumulated:
    """Run the passes of ranks that compute together. Gradients flow between them, so all must divide by one number.

    This number must be known before the first pass, so it is the number of samples of the global batch. If all ranks
    have the same samples, it is multiplied by the tokens per sample, which keeps fp16 gradients in range. Otherwise the
    ranks may have different numbers of tokens.
    """
    parts.witness.gradients_are_cleared(state.optimizer)
    clear_grads(state.optimizer)
    number = len(batch.global_ids)
    loss_fn = parts.loss_fn
    precision = parts.precision
    ranks = parts.ranks
    if not (is_sharded(state.model) or ranks.norms.exchange or ranks.copies is not None):
        number *= max(1, batch.tokens // max(1, batch.size))
    if ranks.stages is not None:
        done = combine_divided(ranks.stages.train(state, batch, loss_fn, precision, number), number)
        return combine(done, ranks.sums, state.device) if is_sharded(state.model) else done
    if is_sharded(state.model):
        return parts.sharded(state, batch, loss_fn, precision)
    step = state.step + 1
    witness = parts.witness
    norms = ranks.norms
    outputs = [
        run_divided(state, micro, loss_fn, precision, number, f"micro-batch {index} of step {step}", witness, norms)
        for index, micro in enumerate(batch.micro)
    ]
    return combine_divided(outputs, number)


def _finish(state: TrainState, done: Accumulated, parts: _Parts, *, is_summed: bool = False) -> _Gradients:
    """Unscale the gradients, sum them over ranks, call the probes, and clip.

    ``is_summed``: ``done`` already combines all ranks, and the gradients are already unscaled and summed.
    """
    clip = parts.clip
    ranks = parts.ranks
    witness = parts.witness
    world = ranks.sums
    is_to_sum = world.size > 1 and not ranks.exact and not is_sharded(state.model) and not is_summed
    if ranks.divided:
        settle_parts(state.parameters)
    if is_to_sum:
        fill_missing(state.parameters, world)
        done = combine(done, world, state.device)
    parameters, grads = collect_grads(state.parameters, done)
    if ranks.stages is not None:
        ranks.stages.sum_tied(state.model)
    if grads and not is_summed and (state.scaler.scale is not None or done.correction is not None):
        _unscale(state, locals_of(grads), done, witness)
    if is_to_sum:
        sum_grads(grads, world, ranks.copies)
    probed = {name: value for probe in parts.probes for name, value in probe(state).items()}
    if clip is not no_clip and len(state.optimizer.param_groups) > 1:
        parameters = parts.model_order(state.model, parameters)
        grads = [grad for parameter in parameters if (grad := parameter.grad) is not None]
    counted = grads if ranks.stages is None else ranks.stages.counted(state.model, parameters)
    grad_norm = global_norm(counted) if counted else torch.zeros((), device=state.device)
    if ranks.stages is not None:
        grad_norm = ranks.stages.norm_of_all(grad_norm)
    if grads and clip is not no_clip:
        witness.gradients_are_clipped(clip, parameters, grad_norm)
        clip(parameters, grad_norm)
    return _Gradients(done, grad_norm, probed)


def _require_made(schedule: object, precision: object, clip: object) -> None:
    """Raise UsageError for a part such as ``clip=1.0``, which would otherwise fail inside the first step."""
    for name, part, fits, example in (
        ("schedule", schedule, callable(schedule), "make_schedule('cosine', total=1000), or any f(step, fraction)"),
        ("precision", precision, isinstance(precision, Precision), "Precision('bf16', 'cuda')"),
        ("clip", clip, callable(clip), "make_clip('norm', 1.0)"),
    ):
        if not fits:
            raise UsageError(
                f"make_step: {name} is {part!r}, which is a setting and not an object", remedy=f"pass {example}"
            )


def set_lr(optimizer: Optimizer, factor: float | None) -> float:
    """Set every group to its base learning rate times ``factor``; None: unchanged. Return the first group's rate."""
    groups = optimizer.param_groups
    for group in groups if factor is not None else ():
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
    return float(groups[0]["lr"])


def clear_grads(optimizer: Optimizer) -> None:
    """Drop the gradients of the last step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _unscale(state: TrainState, grads: list[Tensor], done: Accumulated, witness: StepWitness) -> None:
    """Divide by the loss scale, and make the sum over micro-batches exact, see ``accumulate``."""
    if state.scaler.scale is not None:
        witness.gradients_are_multiplied(state.scaler.scale.reciprocal())
        state.scaler.unscale_(grads)
    if done.correction is not None:
        witness.gradients_are_multiplied(done.correction)
        torch._foreach_mul_(grads, done.correction)


def collect_grads(parameters: Sequence[Tensor], done: Accumulated) -> tuple[list[Tensor], list[Tensor]]:
    """Return those of the optimizer's parameters that have a gradient, and the gradients.

    Raises:
        UsageError: No parameter has a gradient though the weight of the loss is not 0, or a gradient is sparse (torch
            cannot compute its norm).
    """
    parameters = [p for p in parameters if p.grad is not None]
    grads = [grad for p in parameters if (grad := p.grad) is not None]
    if not parameters and done.weight != 0:  # a host sync on a GPU, only in this case
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


_VERSION = operator.attrgetter("_version")
VERSION_COUNTED_PACKAGES = ("torch", "trainwright")
"""Packages whose optimizers with ``_init_group`` write in place, so that autograd's version counters increase. Other
optimizers may write through ``.data``, which leaves the counters unchanged."""


class Update:
    """Calls the optimizer. If that runs out of memory, frees memory and calls it once more.

    Moments are created before the first update, when nothing is written yet. Raises OutOfMemoryError. Its ``whole`` is
    False if the update may have changed a part of the state.
    """

    def __init__(self, recovery: Recovery, witness: StepWitness = SILENT) -> None:
        self._recovery, self._witness = recovery, witness
        self._num_made = 0  # parameters whose moments exist
        self._written: _WriteTracker | None = None

    def __call__(self, skipped: Tensor, state: TrainState, batch: StepBatch) -> tuple[OomReport, ...]:
        """Run the update. Return a report of the failed attempt, if there was one."""
        optimizer = state.optimizer
        reports: tuple[OomReport, ...] = ()
        while True:
            before = self._before(optimizer)
            try:
                self._update(skipped, optimizer)
                return reports
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                seen = replace(oom_snapshot(error, state, batch), phase="update", module="")
            if state.is_divided or not before.is_undone():
                raise _torn_error(state, seen.error)
            self._witness.memory_ran_out()
            if reports:
                self._recovery.put_back(state)
            micro = None if reports else max(micro.size for micro in batch.micro)
            reports += (make_room(seen, batch, micro, state),)
            if len(reports) > 1:
                raise _does_not_fit(state, reports)
            for group in optimizer.param_groups:
                if "foreach" in group and not group.get("fused"):  # its temporaries are as large as the weights
                    group["foreach"] = False

    def _before(self, optimizer: Optimizer) -> _WriteTracker:
        """Record the versions now. The list of tensors is kept, because making it takes 2 % of a small step."""
        if self._written is None or not self._written.is_of(optimizer):
            self._written = _WriteTracker(optimizer)
        self._written.begin()
        return self._written

    def _update(self, skipped: Tensor, optimizer: Optimizer) -> None:
        if self._num_made < sum([len(group["params"]) for group in optimizer.param_groups]):
            num_due = sum([p.grad is not None for group in optimizer.param_groups for p in group["params"]])
            if num_due > self._num_made and not (skipped.device.type == "cpu" and bool(skipped)):
                make_moments(optimizer)
                self._num_made = num_due
        update_unless(skipped, optimizer)


@torch.no_grad()
def make_moments(optimizer: Optimizer) -> None:
    """Create the state of all groups before the first update.

    torch's optimizers create the state of a group right before they update that group. If memory ran out there, the
    groups before it would be updated already.
    """
    for part in parts_of(optimizer):
        make = getattr(part, "_init_group", None)
        if make is None:
            continue
        lists = len(inspect.signature(make).parameters) - 1  # it fills lists of parameters, gradients, moments
        for group in part.param_groups:
            make(group, *([] for _ in range(lists)))


class _WriteTracker:
    """Detects writes of an optimizer to weights and state, by version counters of tensors and values of numbers."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._parts = optimizer, parts_of(optimizer)
        self._is_counted = all(_writes_counted(part) for part in self._parts)
        self._states = [part.state for part in self._parts]
        self._sizes = self._sizes_now()
        self._tensors: list[Tensor] = []
        self._numbers: list[tuple[StateDict, str]] = []
        if self._is_counted:
            self._tensors += [p for group in optimizer.param_groups for p in group["params"]]
            for own in [own for state in self._states for own in state.values()]:
                self._tensors += [value for value in own.values() if isinstance(value, Tensor)]
                self._numbers += [(own, name) for name, value in own.items() if not isinstance(value, Tensor)]

    def _sizes_now(self) -> list[list[int]]:
        return [[*map(len, state.values())] for state in self._states if self._is_counted]

    def is_of(self, optimizer: Optimizer) -> bool:
        """Return True if the optimizer still has the states listed here. Loading a state dict replaces them."""
        states = [part.state for part in parts_of(optimizer)]
        return [*map(id, states)] == [*map(id, self._states)] and self._sizes_now() == self._sizes

    def begin(self) -> None:
        """Set the reference for later writes."""
        self._before = self._now()

    def _now(self) -> tuple[int, list[object]]:
        """Return the sum of all version counters, which never decreases, and the values of the numbers."""
        return sum(map(_VERSION, self._tensors)), [own.get(name) for own, name in self._numbers]

    def is_undone(self) -> bool:
        """Drop entries that were added to the state, which may be incomplete.

        Return False if anything else was written, or may have been.
        """
        if not self._is_counted:
            return False
        for part, sizes in zip(self._parts, self._sizes, strict=True):
            for parameter in list(part.state)[len(sizes) :]:  # added entries come last
                del part.state[parameter]
            for own, size in zip(part.state.values(), sizes, strict=True):
                for name in list(own)[size:]:
                    del own[name]
        now = _WriteTracker(self._optimizer)
        is_same = [*map(id, now._tensors)] == [*map(id, self._tensors)] and now._sizes == self._sizes
        return is_same and self._now() == self._before


def _writes_counted(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.partition(".")[0] in VERSION_COUNTED_PACKAGES and hasattr(
        optimizer, "_init_group"
    )


def _does_not_fit(state: TrainState, reports: tuple[OomReport, ...]) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"out of memory in the update of step {state.step + 1}{_first_note(state)}: {reports[-1].error}. "
        "It has written nothing: the state is that of the last good step",
        reports=reports,
        remedy="an optimizer with less state (sgd, adafactor) or with it on the host of a GPU (optimizer.offload: "
        "true), or a device with more memory",
    )


def _torn_error(state: TrainState, error: str) -> OutOfMemoryError:
    """Return the error for a state in which some weights may be updated and others not."""
    return OutOfMemoryError(
        f"out of memory in the update of step {state.step + 1}{_first_note(state)}: {error}. "
        "Weights and moments may be updated in part, so this state is not saved",
        whole=False,
        remedy="go on from the last checkpoint with an optimizer that needs less (optimizer.args.foreach: false has no "
        "temporaries as large as the weights; sgd and adafactor keep less state), or on a device with more memory",
    )


def raise_if_torn(state: TrainState, error: Exception) -> None:
    """Raise OutOfMemoryError if memory ran out after the optimizer's update: while averaging or restoring buffers."""
    if is_out_of_memory(error):
        raise _torn_error(state, str(error).splitlines()[0][:200]) from None


def _first_note(state: TrainState) -> str:
    return "" if state.optimizer.state and state.step else " (the first one makes the optimizer's state)"
