"""Measures the steps of one rank in a user's loop: calls, exchanges, gradients, random numbers, operations."""

from __future__ import annotations

import itertools
import math
import re
import statistics
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, distributed, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from trainwright.checkpoint.checksums import Checksums, no_checksums, start_checksums
from trainwright.doctor.facts.ranks import FOLDS, ExchangeFacts, NonfiniteFacts, RanksFacts, RankStep
from trainwright.doctor.measure.ranks.exchange import Exchange, Site, findings_of, raise_alarm
from trainwright.doctor.measure.ranks.replica import INTERVAL_STEPS, Replica, RowSums, is_due
from trainwright.errors import text_of
from trainwright.recorder.callers import caller
from trainwright.recorder.numbers import Numbers
from trainwright.recorder.probes import Probe, WatchedObjects, WatchSite
from trainwright.recorder.program import (
    Backward,
    Call,
    ClipGradients,
    Instruction,
    Multiply,
    Operation,
    RecordedStep,
    Slot,
    alive,
    constants_of,
    tensors_of,
)
from trainwright.recorder.ranks import has_others, local_part, num_collectives
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.runs.json_values import Facts, strict

MIN_DRAWS = 16  # Minimum number of random draws. Fewer may be a choice that all ranks make together.
_UNUSED = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
_WATCHES = itertools.count()


@dataclass(slots=True)
class StepSoFar:
    """Observations of the current step. ``waiting_s``: time in calls that wait for other ranks. See RankStep."""

    calls: int = 0
    micro_batches: int = 0
    waiting_s: float = 0.0
    backward_at_s: float = 0.0
    collectives: int = 0  # collectives before the forward call
    divides: bool = False
    begin: list[Tensor] = field(default_factory=list)  # generator states after the batch was read
    draws: bool = False
    norm: Tensor | None = None
    factor: float | None = None
    missing: list[str] = field(default_factory=list)
    exchange: ExchangeFacts = field(default_factory=ExchangeFacts)
    sums: RowSums = field(default_factory=RowSums)


def make_ranks_probe(watched: WatchedObjects) -> Probe | None:
    """Returns the probe of one of several ranks; None for a single process."""
    return RanksProbe(watched) if has_others() else None


class RanksProbe(Probe):
    """Reports the steps of this rank. ``urgent``: the comparison has found something new."""

    name = RanksFacts.experiment
    observes_every_step = True

    def __init__(self, watched: WatchedObjects) -> None:
        self._parameters, self._optimizers = watched.subject.parameters, watched.subject.optimizers
        self._replica, self._sums = Replica(watched.subject), SumWatch(watched.subject.parameters)
        self._exchange: Exchange | None = None
        self._steps, self._step = 0, StepSoFar()
        self._patience_s = watched.patience_s
        self._pending: dict[int, tuple[RankStep, RowSums]] = {}
        # time outside of communication, and time of the full step
        self._seconds: deque[tuple[float, float]] = deque(maxlen=INTERVAL_STEPS)
        self._seen: RanksFacts | None = None
        self._reported: RanksFacts | None = None
        self._codes: set[str] = set()
        self._schedule = ""

    @property
    def _is_due(self) -> bool:
        return is_due(self._steps + 1)

    def _at(self, phase: str) -> None:
        if self._exchange is not None:
            self._exchange.at(self._steps, phase)

    # begin and end

    def begin(self, site: WatchSite) -> None:
        number = next(_WATCHES)
        place = Site(site.folder, lambda facts: raise_alarm(facts, site.write, site.say))
        try:
            meeting, patience_s = self._replica.meeting(), self._patience_s
            exchange = Exchange(f"watch/{number}", meeting, place, number=number, patience_s=patience_s)
        except RuntimeError:
            return  # no other process can reach the store, so each rank is watched alone
        exchange.post(self._replica.first_row(exchange.rank))
        self._exchange = exchange

    def end(self, error: BaseException | None) -> None:
        if self._exchange is None:
            return
        text = "finished" if error is None else text_of(error)[:300]
        missing = _UNUSED.search(str(error or ""))
        trained = [name for name, p in zip(self._replica.names, self._parameters) if p.requires_grad]
        unused = tuple(trained[int(n)] for n in missing[1].split() if int(n) < len(trained)) if missing else ()
        self._exchange.close(text, unused, wait=error is None or isinstance(error, Exception))

    def on_forked(self) -> None:
        self._exchange = None  # its thread does not exist in the forked process

    # forward

    def on_batch(self, iterator: object, ids: object, batch: object, wait_s: float) -> None:
        if self._is_due and not self._step.calls:
            self._step.begin = self._generators()

    def on_forward(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        self._at("forward" if torch.is_grad_enabled() else "evaluation")
        if not torch.is_grad_enabled():
            return
        step = self._step
        step.calls += 1
        if self._is_due:
            tensors = tensors_of((args, kwargs), 3)
            step.divides |= any(each.is_leaf and each.requires_grad for each in tensors)
            step.begin, step.collectives = step.begin or self._generators(), num_collectives()
            if step.calls == 1:
                step.sums.inputs = start_checksums(tensors)
                step.sums.buffers = self._replica.buffers(without_statistics=True)

    def on_output(self, root: nn.Module, output: object) -> None:
        self._at("between")
        step = self._step
        if self._is_due and step.calls and torch.is_grad_enabled():
            step.divides |= num_collectives() > step.collectives
            step.draws = step.draws or _many_drawn(step.begin, self._generators())

    def on_wrapped_call(self, wrapper: nn.Module, is_synced: bool) -> None:
        if torch.is_grad_enabled():
            exchange = self._step.exchange
            exchange.wrapped_calls, exchange.last_synced = exchange.wrapped_calls + 1, is_synced
            exchange.synced_calls += is_synced

    def on_waited(self, seconds: float) -> None:
        self._step.waiting_s += seconds
        if self._is_due and self._step.calls <= 1 and torch.is_grad_enabled():
            self._step.sums.buffers = self._replica.buffers(without_statistics=True)  # DDP has just synchronized them

    def _generators(self) -> list[Tensor]:
        """Returns the states of torch's generators, of the CPU and of the parameters' device."""
        on_gpu = bool(self._parameters) and self._parameters[0].is_cuda
        on_device = [torch.cuda.get_rng_state(self._parameters[0].device)] if on_gpu else []
        return [torch.default_generator.get_state(), *on_device]

    # gradients

    def on_backward(self, losses: tuple[Tensor, ...], options: Kwargs) -> None:
        self._at("backward")
        self._step.micro_batches += 1
        self._step.divides |= losses[0].numel() > 1  # a pipeline stage gets its gradient from outside
        self._step.backward_at_s = time.perf_counter()

    def on_gradients(self) -> None:
        self._step.waiting_s += time.perf_counter() - self._step.backward_at_s
        self._at("between")
        if self._is_due:
            self._sums.made()
            self._step.sums.reduced = no_checksums if self._replica.is_split else self._sums.as_made
            self._step.norm = self._norm()

    def on_reduce(self, tensor: Tensor, operation: object) -> None:
        self._at("exchange")
        if self._is_due:
            self._sums.before(tensor, operation)

    def on_reduced(self, tensor: Tensor, seconds: float) -> None:
        self._at("between")
        self._step.waiting_s += seconds
        if self._is_due:
            self._sums.after(tensor)

    def on_unscale(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        self._sums.used()

    def on_clip(
        self, by: str, at: float, parameters: list[Tensor], norm: Tensor | None, function: TorchFunction | None = None
    ) -> None:
        self._sums.used()

    def _norm(self) -> Tensor | None:
        """Returns the norm of this rank's part of the gradients if the model is sharded."""
        grads = [local_part(p.grad) for p in self._parameters if p.grad is not None] if self._replica.is_split else []
        return nn.utils.get_total_norm(grads) if grads else None

    # the update

    def on_step(self, optimizer: Optimizer, args: Args) -> None:
        if optimizer not in self._optimizers:
            return  # a nested call that updates a part of the parameters (ZeRO)
        self._at("update")
        weights = self._replica.before_update(is_due=self._is_due)
        if not self._is_due:
            return
        if self._step.sums.weights is no_checksums:
            self._step.sums.weights = weights
        if (before := self._step.norm) is not None and (now := self._norm()) is not None:
            self._step.factor = float(now / before) if float(before) > 0 else None
        if not self._replica.is_split:
            self._sums.used()
            self._step.sums.gradients.append(self._replica.gradients(optimizer))
            owned = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
            named = zip(self._replica.names, self._parameters)
            self._step.missing += [name for name, p in named if id(p) in owned and p.grad is None]

    def on_schedule(self, scheduler: object) -> None:
        self._schedule = self._schedule or caller() or ""

    def on_closed(self, step: RecordedStep) -> None:
        so_far, self._step = self._step, StepSoFar()
        self._steps = step.step
        self._at("between")
        whole_s = float(step.values.get("step_s", 0.0))
        self._seconds.append((max(0.0, whole_s - so_far.waiting_s), whole_s))
        if self._exchange is None:
            return
        self._replica.after_update(step.step, whole_s)
        if is_due(step.step):
            so_far.sums.moments = self._replica.moments()
            self._pending[step.step] = (self._row(step, so_far, self._exchange), so_far.sums)
        facts = self._exchange.facts
        if facts is not None and facts is not self._seen:
            self._seen, found = facts, {each.code for each in findings_of(facts)}
            self.urgent = self.urgent or not found <= self._codes
            self._codes |= found

    def _row(self, step: RecordedStep, so_far: StepSoFar, exchange: Exchange) -> RankStep:
        """Returns the row of a step without its checksums."""
        own, whole = zip(*self._seconds)
        self._seconds.clear()
        is_own, size = self._replica.has_own_data, exchange.size
        is_known = is_own and bool(step.ids) and all(of_batch is not None for of_batch in step.ids)
        states = b"".join(state.numpy().tobytes() for state in so_far.begin)
        return RankStep(
            rank=exchange.rank,
            step=step.step,
            groups=self._replica.groups(),
            schedule=self._schedule,
            micro_batches=so_far.micro_batches,
            samples=samples_of(step) if is_known else (),
            rng=zlib.crc32(states) if is_own else None,
            draws=so_far.draws,
            factor=so_far.factor,
            divides=so_far.divides and not so_far.exchange.wrapped_calls and not self._replica.is_split,
            program=traits_of(step),
            summed=self._sums.are_undivided(step, size),
            shrunk=so_far.exchange.last_synced and is_divided_again(step, size, so_far.micro_batches),
            without_gradient=tuple(so_far.missing[:FOLDS]),
            exchange=so_far.exchange,
            steps=len(own),
            own_s=statistics.median(own),
            step_s=statistics.median(whole),
        )

    def on_read(self, step: RecordedStep, numbers: Numbers) -> None:
        if self._exchange is None:
            return
        if (pending := self._pending.pop(step.step, None)) is not None:
            self._exchange.post(self._replica.completed(*pending))
        if changes := self._replica.changes(step.step):
            self._exchange.report_changes(changes)
        if not numbers.are_finite and numbers.losses:
            own = next((loss for loss in numbers.losses if not math.isfinite(loss)), numbers.losses[0])
            inputs = [each.tensor for call in step.calls for each in constants_of((call.args, call.kwargs))]
            finite = all(bool(each.isfinite().all()) for each in inputs if each.is_floating_point())
            found = NonfiniteFacts(step=step.step, own_loss=own, inputs_finite=finite, samples=samples_of(step)[:64])
            self._exchange.report_nonfinite(found)

    def values(self) -> Facts | None:
        self.urgent = False
        facts = self._exchange.facts if self._exchange is not None else None
        if facts is self._reported:
            return None
        self._reported = facts
        return None if facts is None else strict(vars(facts))


def samples_of(step: RecordedStep) -> tuple[int, ...]:
    """Returns the known sample ids of the step; at most 256."""
    return tuple([i for of_batch in step.ids for i in of_batch or ()][:256])


def _many_drawn(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    """Returns True if the GPU generator was used, or MIN_DRAWS numbers were drawn from the CPU generator."""
    on_gpu = any(not torch.equal(a, b) for a, b in zip(before[1:], after[1:]))
    # position in the 624 numbers of mt19937
    then, now = (int(each[0][16:24].view(torch.int64)) for each in (before, after))
    return on_gpu or (now - then) % 624 >= MIN_DRAWS


MEANS = frozenset(
    {"mean", "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"}
    | {"binary_cross_entropy", "binary_cross_entropy_with_logits", "gaussian_nll_loss", "poisson_nll_loss"}
)
DIVISIONS = frozenset({"div", "__truediv__", "true_divide", "div_"})


class SumWatch:
    """Tracks gradients through an ``all_reduce`` of the loop, to find sums that are used without a division."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self.made()

    def made(self) -> None:
        """Records the gradients after a backward pass."""
        self.as_made: Checksums = start_checksums([p.grad for p in self._parameters])
        self._reduced: dict[int, tuple[Checksums, Checksums]] = {}  # before and after the reduction
        self._used: bool | None = None

    def before(self, tensor: Tensor, operation: object) -> None:
        """Called before ``tensor`` is reduced."""
        if operation == distributed.ReduceOp.SUM and (index := self._index_of(tensor)) is not None:
            self._reduced[index] = (start_checksums([tensor]), no_checksums)

    def after(self, tensor: Tensor) -> None:
        """Called after ``tensor`` was reduced."""
        if (index := self._index_of(tensor)) is not None and index in self._reduced:
            self._reduced[index] = (self._reduced[index][0], start_checksums([tensor]))

    def used(self) -> None:
        """Called before the gradients are clipped, unscaled, or used for the update. The first call counts."""
        if self._used is None and self._reduced:
            now = start_checksums([p.grad for p in self._parameters])()
            self._used = all(after() == [now[index]] for index, (_, after) in self._reduced.items())

    def _index_of(self, tensor: Tensor) -> int | None:
        address = tensor.data_ptr()
        grads = ((n, p.grad) for n, p in enumerate(self._parameters))
        return next((n for n, grad in grads if grad is not None and grad.data_ptr() == address), None)

    def are_undivided(self, step: RecordedStep, num_ranks: int) -> bool:
        """Returns True if gradients of mean losses were summed over the ranks and not divided by their number.

        Drops the records of the step.
        """
        reduced, used, made = self._reduced, self._used, self.as_made
        self._reduced, self._used, self.as_made = {}, None, no_checksums
        if not reduced or not used:
            return False
        sums, divisor = made(), divisor_of_mean(step)
        went_in = all(before() == [sums[index]] for index, (before, _) in reduced.items())
        return went_in and divisor is not None and divisor % num_ranks != 0


def is_divided_again(step: RecordedStep, num_ranks: int, micro_batches: int) -> bool:
    """Returns True if a mean loss is divided by the number of ranks, too. Half a squared error does not count."""
    divisor = divisor_of_mean(step)
    is_half = divisor == 2 and any(isinstance(each, Operation) and each.name == "mse_loss" for each in step.program)
    return divisor == num_ranks * max(1, micro_batches) and not is_half


def divisor_of_mean(step: RecordedStep) -> float | None:
    """Returns the number by which a mean loss is divided, 1 without a division; None for other losses."""
    made_by = {number: each for each in step.program if isinstance(each, Operation) for number in each.outputs}
    last = next((each for each in reversed(step.program) if isinstance(each, Backward)), None)
    slot, divisor = last.slot if last else None, 1.0
    while slot is not None and (operation := made_by.get(slot)) is not None:
        if operation.name in MEANS:
            return divisor if operation.kwargs.get("reduction", "mean") == "mean" else None
        first, *others = operation.args
        if operation.name not in DIVISIONS or not others or not isinstance(others[0], int | float):
            return None
        divisor, slot = divisor * others[0], first.number if isinstance(first, Slot) else None
    return None


_MAX_LENGTH = 160


def traits_of(step: RecordedStep) -> dict[str, str]:
    """Returns the traits of a step as texts by name, such as modes, precision and loss; {} without a recording."""
    program = alive(step.program)
    calls = [each for each in program if isinstance(each, Call)]
    if not calls:
        return {}
    modes, wanted = calls[0].training, calls[0].wanted
    losses = [each.name for each in program if isinstance(each, Operation) and each.with_grad]
    return {
        "modes": f"{sum(modes)} of {len(modes)} modules in training mode",
        "trained weights": f"{sum(wanted)} of {len(wanted)}",
        "precision": " and ".join(dict.fromkeys(_precision(call) for call in calls)),
        "loss": " ".join(losses)[:_MAX_LENGTH],
        "changes of the gradients": ", ".join(_changes(program))[:_MAX_LENGTH] or "none",
    }


def _precision(call: Call) -> str:
    is_on, dtype, _ = call.autocast
    return f"autocast to {dtype}" if is_on else "no autocast"


def _changes(program: list[Instruction]) -> Iterator[str]:
    for each in program:
        if isinstance(each, ClipGradients):
            yield f"clipped by {each.by} at {each.at:.3g}"
        elif isinstance(each, Multiply):
            yield "multiplied"
